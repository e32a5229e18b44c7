"""A loop by hand with small pages and few words, so that texts meet in the prefix cache by themselves."""

import random
import zlib
from collections.abc import Sequence

import numpy as np
from kit.fake_session import FakeSession, resolved
from kit.hand import Hand
from kit.proposers import shuffled

from hemiola.runtime.cache.eviction import Cost
from hemiola.runtime.open import make_loop
from hemiola.runtime.schedule.request import Bounds, Request

NUM_WORDS = 4
P = 4  # tokens in a page, unless a test says otherwise


def next_token(context: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(context, np.int32).tobytes()) % NUM_WORDS


class House(Hand):
    """Not `donate`: what ends or is preempted does not leave its slot as a snapshot."""

    def __init__(
        self,
        hybrid: bool = True,
        donate: bool = False,
        identity: str = "",
        interval: int = 0,
        budget: int = 1000,
        num_drafts: int = 0,
        **sizes: int,
    ) -> None:
        small = {"num_pages": 65, "num_slots": 17, "page_len": P, "chunk_len": 2, "max_len": 48}
        config = resolved(
            **small | {"max_rows": 8, "prefix_cache": True} | sizes,
            max_step_tokens=budget,
            num_drafts=num_drafts,
            snapshot_interval=interval,
        )
        self.session = FakeSession(config, next_token, hybrid)
        cost = Cost(10, 40 if hybrid else 0)
        loop = make_loop(config, self.session, self.session, None, cost, identity)
        if num_drafts:
            shuffled(0, next_token, NUM_WORDS).drive(loop.steps)
        super().__init__(loop, Bounds(config.max_len, config.max_len, 1000, ()))
        self.scheduler, self.prefix = loop.scheduler, loop.scheduler.prefix
        self.pages, self.slots, self.evictor = self.prefix.pages, self.prefix.slots, self.prefix.evictor
        if not donate:
            release = self.prefix.release
            self.prefix.release = lambda slot_id, donate=False: release(slot_id)

    def ask(self, prompt: Sequence[int], num_new: int = 1, tenant: str = "") -> Request:
        request_id = self.submit(prompt, max_tokens=num_new, cache_salt=tenant)
        self.loop._read_inbox()
        return self.requests[request_id - 1]

    def serve(self, prompt: Sequence[int], num_new: int = 1, tenant: str = "") -> Request:
        """One request, alone, to its end."""
        request = self.ask(prompt, num_new, tenant)
        self.run()
        return request

    def hit(self, prompt: Sequence[int], num_new: int = 1, tenant: str = "") -> int:
        """Tokens that this request, served now, finds."""
        return self.serve(prompt, num_new, tenant).hit_len

    def snapshots(self) -> list[tuple[int, str]]:
        """(edge, kind) of all there are."""
        entries = (entry for _, entry in self.prefix.contents())
        return sorted((entry.edge, entry.kind) for entry in entries if entry.slot_id)


def known(request: Request, num_tokens: int | None = None) -> list[int]:
    return request.ids[: request.total_len if num_tokens is None else num_tokens].tolist()


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens that next_token never yields."""
    return random.Random(seed * 1000 + 7).choices(range(10, 97), k=length)


def serve_all(house: House, prompts: Sequence[Sequence[int]]) -> list[int]:
    return [house.hit(prompt) for prompt in prompts]
