"""A process that opens engines which a stranger may have made, and says what came of each.

    python tests/kit/hostile.py        # lines of engine directories in, lines of JSON out

By itself, so that a crash, code that runs and memory that is taken show, and end nothing else.
"""

import io
import json
import os
import resource
import select
import subprocess
import sys
import warnings
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

ROOM = 3 * 2**30  # bytes of addresses that an engine may take beside what the imports took
LIMIT_S = 120  # a hang; an engine opens in a fraction of a second
OPTIONS: dict[str, Any] = {"max_rows": 2, "num_pages": 40, "host_cache_bytes": 2**22}
PROMPT, NUM_TOKENS = list(range(5, 45)), 8  # more than a page, so that a prefix is stored
CHAT = [{"role": "user", "content": "def f(x): return"}]


class Opener:
    """The other side of that process; a new one after each that died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._sound: dict[Path, dict[str, Any]] = {}

    def open_sound(self, engine_dir: Path) -> dict[str, Any]:
        """What comes of an engine that nobody changed; a process opens it once."""
        if engine_dir not in self._sound or self._process is None:
            self._sound[engine_dir] = self.open(engine_dir)
        return self._sound[engine_dir]

    def check_sound(self) -> None:
        """No engine that came between has changed what those say."""
        for engine_dir, found in self._sound.items():
            assert self.open(engine_dir) == found, engine_dir

    def open(self, engine_dir: Path) -> dict[str, Any]:
        """{"refused": line}, {"tokens": [...], "text": ...}, {"error": traceback} or {"died": status}."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{engine_dir}\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], LIMIT_S)[0]:
            self.close()
            return {"died": "it did not end"}
        line = process.stdout.readline()
        if not line:
            self._process = None
            return {"died": process.wait()}
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        root = Path(__file__).resolve().parents[2]
        found = os.pathsep.join([str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(
            [sys.executable, __file__],
            cwd=root,
            env=os.environ | {"PYTHONPATH": found},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def _outcome(engine_dir: str) -> dict[str, Any]:
    import traceback

    from hemiola.runtime.api import SamplingParams
    from hemiola.runtime.errors import Refused
    from hemiola.runtime.llm import LLM

    try:
        _inspect(Path(engine_dir))
    except BaseException:
        return {"error": traceback.format_exc()}
    try:
        with LLM(engine_dir, **OPTIONS) as llm:
            params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0)
            (output,) = llm.generate([PROMPT], params)
            packed = llm.export_prefix(PROMPT)
            llm.import_prefix(packed)
            said = llm.chat_text(CHAT) if llm.manifest.has_tokenizer else ""
            return {"tokens": list(output.token_ids), "text": output.text, "chat": said}
    except Refused as error:
        return {"refused": str(error)}
    except BaseException:
        return {"error": traceback.format_exc()}


def _inspect(engine_dir: Path) -> None:
    """As the command does, for people and for programs."""
    from hemiola.runtime import manifest
    from hemiola.runtime.cli.inspected import described, show
    from hemiola.runtime.config import ServeConfig
    from hemiola.runtime.errors import Refused

    config = ServeConfig(**OPTIONS)
    with suppress(Refused), redirect_stdout(io.StringIO()) as shown:
        found = manifest.load(engine_dir)
        json.dumps(described(engine_dir, found, config))
        show(engine_dir, found, config)
    assert shown.getvalue().replace("\n", "").isprintable(), "a terminal obeys it"


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is no answer
    warnings.simplefilter("ignore")
    limited = False
    for line in sys.stdin:
        found = _outcome(line.rstrip("\n"))
        print(json.dumps(found), file=out, flush=True)
        if not limited:  # the first engine is a good one: all is imported and compiled
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
            limited = True


if __name__ == "__main__":
    main()
