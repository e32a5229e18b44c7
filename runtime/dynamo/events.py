"""The cache's changes as Dynamo's KV events. Blocks are pages, those alone that requests can start behind."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np

from hemiola.runtime.cache.tree import Entry

log = logging.getLogger("hemiola")
MAX_EVENTS = 256  # of a batch
MOST_WAITING = 2**14  # changes; more are dropped where Dynamo does not take them
CLOSE_S = 5.0


class Publisher(Protocol):
    """Dynamo's."""

    def publish_batch(self, events: list[dict[str, Any]]) -> None: ...


@dataclass(frozen=True)
class PushSource:
    """Dynamo knows it by this name, and calls `on_ready` with its publisher."""

    on_ready: Callable[[Publisher], None]
    dp_rank: int = 0


class _Change(NamedTuple):
    """What the scheduler's thread leaves to the other one."""

    path: tuple[tuple[bytes, bytes], ...]  # key and tokens
    parent: bytes  # key of the page before the first one; b"": none
    salt: bytes
    stored: bool


def block_hash(key: bytes) -> int:
    """Of a page's key; Dynamo takes signed numbers of 64 bits."""
    return int.from_bytes(key[:8], "little") & (2**63 - 1)


def stored_change(path: Sequence[Entry]) -> _Change:
    before = path[0].parent
    assert before is not None
    root = before
    while root.parent is not None:
        root = root.parent
    pages = tuple((entry.key, entry.tokens) for entry in path)
    return _Change(pages, before.key if before is not root else b"", root.tokens, True)


def removed_change(path: Sequence[Entry]) -> _Change:
    return _Change(tuple((entry.key, b"") for entry in path), b"", b"", False)


def event_of(change: _Change, page_len: int) -> dict[str, Any]:
    """As `publish_batch` takes it."""
    hashes = [block_hash(key) for key, _ in change.path]
    if not change.stored:
        return {"type": "removed", "block_hashes": hashes}
    tokens = b"".join(tokens[: 4 * page_len] for _, tokens in change.path)
    return {
        "type": "stored",
        "token_ids": np.frombuffer(tokens, np.int32).tolist(),
        "num_block_tokens": [page_len] * len(hashes),
        "block_hashes": hashes,
        "parent_hash": block_hash(change.parent) if change.parent else None,
        "cache_salt": tenant_of(change.salt) or None,
    }


def tenant_of(salt: bytes) -> str:
    """See PrefixCache.chain."""
    return salt[sha256().digest_size :].decode()


class CacheEvents:
    """Publishes from a thread of its own, in the order of the changes."""

    def __init__(self, publisher: Publisher, page_len: int) -> None:
        self._publisher, self._page_len = publisher, page_len
        self._changes: SimpleQueue[_Change | None] = SimpleQueue()
        self._warned = False
        self._thread = threading.Thread(target=self._publish, name="hemiola-events", daemon=True)
        self._thread.start()

    # The scheduler's thread.

    def stored(self, path: Sequence[Entry]) -> None:
        self._put(stored_change(path))

    def removed(self, path: Sequence[Entry]) -> None:
        self._put(removed_change(path))

    def _put(self, change: _Change) -> None:
        if self._changes.qsize() < MOST_WAITING:
            self._changes.put(change)
        else:
            self._warn("too slowly: the router may believe what is not so, which costs hits")

    # Others.

    def close(self) -> None:
        """Publish what there is, and end. Safe to call twice."""
        self._changes.put(None)
        self._thread.join(CLOSE_S)

    def _publish(self) -> None:
        for batch in self._batches():
            try:
                self._publisher.publish_batch([event_of(change, self._page_len) for change in batch])
            except Exception as error:
                self._warn(f"not: {error}")

    def _warn(self, how: str) -> None:
        if not self._warned:
            log.warning("Dynamo takes events of the cache %s", how)
        self._warned = True

    def _batches(self) -> Iterator[list[_Change]]:
        while True:
            batch = [self._changes.get()]
            while batch[-1] is not None and len(batch) < MAX_EVENTS:
                try:
                    batch.append(self._changes.get_nowait())
                except Empty:
                    break
            yield [change for change in batch if change is not None]
            if batch[-1] is None:
                return
