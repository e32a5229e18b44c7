"""`hemiola dynamo-worker` with a door at which it says how many tokens of a prompt it would start behind now.

    TOLD_DOOR=SOCKET python tests/kit/told_worker.py ENGINE_DIR [OPTIONS]

A line of JSON, [token ids, cache salt], is answered with [id of the worker, tokens]: what its cache and the
host's memory have between two steps, for a request with exactly these tokens.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer

import numpy as np

from hemiola.runtime.__main__ import main
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.dynamo import worker
from hemiola.runtime.dynamo.engine import DynamoEngine
from hemiola.runtime.errors import Failed, Refused


class ToldEngine(DynamoEngine):
    async def start(self, worker_id: int) -> object:
        found = await super().start(worker_id)
        llm = self._opened()

        class Answer(StreamRequestHandler):
            def handle(self) -> None:
                ids, salt = json.loads(self.rfile.readline())
                try:
                    tokens = llm._loop.visit(lambda prefix: start_of(prefix, ids, salt))
                except (Refused, Failed):  # it is about to end
                    return
                self.wfile.write(json.dumps([worker_id, tokens]).encode())

        door = ThreadingUnixStreamServer(os.environ["TOLD_DOOR"], Answer)
        door.daemon_threads = True
        threading.Thread(target=door.serve_forever, daemon=True).start()
        return found


def start_of(prefix: PrefixCache, ids: Sequence[int], salt: str) -> int:
    chain = prefix.chain(np.array(ids, np.int32), salt)
    return prefix._match(chain, len(ids)).start


if __name__ == "__main__":
    worker.DynamoEngine = ToldEngine
    sys.argv[1:1] = ["dynamo-worker"]
    main()
