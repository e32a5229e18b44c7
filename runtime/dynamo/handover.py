"""Prompts are computed by one worker and answered by another: Dynamo's prefill and decode.

The frontend sends a prompt to a prefill worker, which computes it and says where its packed prefix can be
fetched; then it sends the request and that place to a decode worker, which imports the prefix and serves it
as a hit. What goes wrong on the way costs the hit and no more: the decode worker computes the prompt.
"""

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any

from hemiola.runtime.dynamo.options import WorkerOptions
from hemiola.runtime.dynamo.request import Submission
from hemiola.runtime.errors import Failed, Lost, Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.peer import Peer

PLACE = "hemiola_peer"
MOST_FETCHES = 16  # at once: a peer that says nothing has a thread for 30 s
log = logging.getLogger("hemiola")
Fields = Mapping[str, Any]


class Handover:
    """One worker's part."""

    def __init__(self, llm: LLM, own: WorkerOptions) -> None:
        """Raises Refused where the port is taken, ImportError without nixl."""
        self._llm = llm
        self.is_prefill = own.disaggregation_mode == "prefill"
        export = llm.export_prefix if self.is_prefill else None
        self._peer = Peer(export, own.peer_host, own.peer_port)
        self._threads = ThreadPoolExecutor(MOST_FETCHES, "hemiola-fetch")
        self._places = BoundedSemaphore(MOST_FETCHES)

    def asked(self, request: Fields) -> Fields:
        """What this worker is to compute of a request."""
        if not self.is_prefill:
            return {**request, "prefill_result": None}
        stopping = {**(request.get("stop_conditions") or {}), "max_tokens": 1, "min_tokens": None}
        return {**request, "stop_conditions": stopping}

    @property
    def result(self) -> dict[str, Any]:
        """What a last chunk has for the other worker."""
        return {"disaggregated_params": {PLACE: self._peer.address}} if self.is_prefill else {}

    async def receive(self, request: Fields, asked: Submission) -> None:
        """Fetch what the other worker has computed. Waits for that one alone: where too many fetches are
        under way, the prompt is computed here."""
        try:
            address = ((request.get("prefill_result") or {}).get("disaggregated_params") or {}).get(PLACE)
            ids = [*asked.prompt, *asked.output_ids]
            if address is None or len(ids) <= self._llm.config.page_len:
                return  # of so few tokens nothing is stored
            if not self._places.acquire(blocking=False):
                raise Lost(f"{MOST_FETCHES} others wait for their workers")
            fetch = self._threads.submit(self._fetch, str(address), ids, asked.params.cache_salt)
            fetch.add_done_callback(lambda _: self._places.release())  # also of one that never began
            await asyncio.wrap_future(fetch)
        except (Refused, Failed, Lost) as error:
            log.warning("a prompt is computed here: %s", error)
        except Exception:  # of NIXL, or there is no memory
            log.exception("a prompt is computed here")

    def _fetch(self, address: str, ids: list[int], cache_salt: str) -> None:
        self._llm.import_prefix(self._peer.fetch(address, ids, cache_salt))

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._peer.close()
