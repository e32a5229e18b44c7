"""Which worker has the longest prefix of a text, as Dynamo's own index of the cache's events knows it.

    python -m kit.deepest NAMESPACE.COMPONENT.ENDPOINT PAGE_LEN

In an environment with ai-dynamo. A list of ids a line on stdin; pages by worker's id, as JSON, on stdout.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


class Deepest:
    """The index in a process of its own. Any thread asks."""

    def __init__(self, python: Path, env: Mapping[str, str], page_len: int) -> None:
        command = [python, "-m", "kit.deepest", "dynamo.hemiola.generate", str(page_len)]
        paths = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env={**env, "PYTHONPATH": paths}, **pipes)
        self._lock = threading.Lock()

    def pages(self, ids: list[int]) -> dict[int, int]:
        """By worker's id; of no tenant."""
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(ids) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        return {int(worker): num for worker, num in json.loads(line).items()}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


async def main(path: str, page_len: int) -> None:
    from dynamo._core import KvIndexer  # pyright: ignore[reportMissingImports]  # an extra of its own
    from dynamo.runtime import DistributedRuntime  # pyright: ignore[reportMissingImports]

    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    indexer = KvIndexer(runtime.endpoint(path), page_len)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        found = indexer.find_matches_for_request(json.loads(line)).scores
        workers = {(key[0] if isinstance(key, tuple) else key): num for key, num in found.items()}
        print(json.dumps(workers), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
