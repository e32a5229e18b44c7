"""A real tritonserver whose engine is two ranks: what a user sees when one of them is lost."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.served import Served, descendants, until

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.client import Client

# Once, in a whole suite, the process that is to be killed had ended before, and nobody knows why.
pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(600),
    pytest.mark.skipif("SERVED_RANKS" not in os.environ, reason="`make soak` runs it: SERVED_RANKS=1"),
]

PROMPT = [20, 6, 7, 30, 31]
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, ignore_eos=True, num_drafts=0)
REASONS = {
    "follower": "the engine failed: RankLost: rank 1 was ended by SIGKILL",
    "leader": "the server at ",
}


def test_a_server_whose_rank_was_killed_ends_its_streams_and_comes_back(
    tiny_engine: Callable[..., Path],
) -> None:
    """Nothing of the old engine lives on, nothing is left in /dev/shm."""
    engine_dir, shared = tiny_engine("qwen3_5_moe_divisible", tp=2, max_len=1024), Path("/dev/shm")
    homes: set[str] = set()
    with LLM(engine_dir) as llm:
        expected = llm.generate([PROMPT], SHORT)[0].token_ids
    with Served(f"--engine-dir={engine_dir}", "--restart=9", "--exit-timeout=10") as served:

        def answers() -> bool:
            try:
                with Client(served.grpc_url) as client:
                    return client.generate([PROMPT], SHORT)[0].token_ids == expected
            except (RuntimeError, ValueError):  # Refused where nobody listens yet
                return False

        assert answers()
        for who, reason in REASONS.items():
            homes |= set(re.findall(r"hemiola-serve-\w+", command(served.pid("bin/tritonserver"))))
            leader, before = served.pid(), descendants(served.process.pid)
            (follower,) = [pid for pid in descendants(leader) if "step.follower" in command(pid)]
            with Client(served.grpc_url, retries=0) as client:
                streams = [client.stream(PROMPT, LONG) for _ in range(32)]
                next(streams[0])
                victim = follower if who == "follower" else leader
                assert command(victim), f"{who} {victim} has ended: {served.said}"
                os.kill(victim, signal.SIGKILL)
                with pytest.raises(RuntimeError, match=reason):
                    list(streams[-1])
            until(lambda before=before: not [pid for pid in before if "hemiola" in command(pid)])
            until(answers)
        assert served.said.count("starting again in") == 2
        assert served.end() == 0, served.said
    assert homes and not [path for path in shared.iterdir() if any(home in path.name for home in homes)]


def command(pid: int) -> str:
    """Empty where it has ended."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes().decode() if path.exists() else ""
