"""What a router that hears of a cache's changes believes; and what it should (cache/depth.py)."""

from collections.abc import Sequence
from typing import Any

from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.cache.tree import Entry
from hemiola.runtime.dynamo.events import block_hash, event_of, removed_change, stored_change, tenant_of


class RouterIndex:
    """Finds blocks by tokens, as Dynamo's index does, and believes nothing twice."""

    def __init__(self, page_len: int) -> None:
        self.page_len = page_len
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str]] = {}  # parent, tokens, tenant

    def stored(self, path: Sequence[Entry]) -> None:
        self.hear(event_of(stored_change(path), self.page_len))

    def removed(self, path: Sequence[Entry]) -> None:
        self.hear(event_of(removed_change(path), self.page_len))

    def hear(self, event: dict[str, Any]) -> None:
        hashes = event["block_hashes"]
        assert hashes, "an event of nothing"
        if event["type"] == "removed":
            for one in hashes:
                del self.blocks[one]
                assert all(parent != one for parent, _, _ in self.blocks.values()), "its children are there"
            return
        parent, ids = event["parent_hash"], event["token_ids"]
        assert event["num_block_tokens"] == [self.page_len] * len(hashes)
        assert parent is None or parent in self.blocks, "behind a block that is not there"
        for n, one in enumerate(hashes):
            assert one not in self.blocks and 0 <= one < 2**63
            tokens = tuple(ids[n * self.page_len : (n + 1) * self.page_len])
            assert len(tokens) == self.page_len
            self.blocks[one] = (parent, tokens, event["cache_salt"] or "")
            parent = one

    def depth(self, ids: Sequence[int], tenant: str) -> int:
        """Tokens of the longest prefix that is there."""
        found = {(parent, tokens, salt): one for one, (parent, tokens, salt) in self.blocks.items()}
        parent, length = None, 0
        while (one := found.get((parent, tuple(ids[length : length + self.page_len]), tenant))) is not None:
            parent, length = one, length + self.page_len
        return length

    def check(self, prefix: PrefixCache) -> None:
        """It believes in the pages with a snapshot at their edge or behind them, and in no others."""
        disk = prefix.disk.tier if prefix.disk is not None and prefix.disk.is_on else None
        tiers = [tier for tier in (prefix, prefix.host, disk) if tier is not None]
        found = [entry for tier in tiers for entry in tier._tree.entries.values()]
        starts = [entry for entry in found if entry.slot_id or not prefix.hybrid]
        true: dict[int, str] = {}
        for entry in starts:
            path = [entry]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            *pages, root = path
            true |= {block_hash(page.key): tenant_of(root.tokens) for page in pages}
        assert {one: tenant for one, (_, _, tenant) in self.blocks.items()} == true
