"""A replica in a process of its own: `python -m kit.peers KIND [ENGINE]` prints its address, and ends with
its stdin.

echo: what it exports follows from the ids; dies: so it does, and it ends once it has said where that lies.
engine: exports what an LLM has stored of the ids 2..99.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from hemiola import LLM, Refused, SamplingParams
from hemiola.runtime.serving import peer
from hemiola.runtime.serving.peer import Peer


def echo(prompt: Sequence[int], *, cache_salt: str = "") -> bytearray:
    """The first id is the number of bytes."""
    if prompt[0] == 0:
        raise Refused("not_found", "prompt", message="nothing is stored", way_out="compute it")
    dice = np.random.default_rng([*prompt, len(cache_salt)])
    return bytearray(dice.integers(0, 256, prompt[0], dtype=np.uint8).tobytes())


def main() -> None:
    with ExitStack() as held:
        export = echo
        if sys.argv[1] == "engine":
            llm = held.enter_context(LLM(sys.argv[2], host_cache_bytes=2**24))
            llm.generate([list(range(2, 100))], SamplingParams(max_tokens=1))
            export = llm.export_prefix
        if sys.argv[1] == "dies":
            peer.select.poll = lambda: os._exit(1)
        print(held.enter_context(Peer(export)).address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
