"""At which page edges a request may start, and at which a snapshot is wanted."""

from collections.abc import Iterable


def reusable_len(known_len: int, page_len: int) -> int:
    """The last page edge that leaves a token to compute, without which there are no logits."""
    return (known_len - 1) // page_len * page_len


def hit_len(known_len: int, page_len: int, cached_len: int, edges: Iterable[int] | None) -> int:
    """Tokens that need not be computed, if the first cached_len have pages and `edges` have snapshots.

    None: the engine needs no snapshots.
    """
    max_len = min(reusable_len(known_len, page_len), cached_len // page_len * page_len)
    if edges is None:
        return max_len
    return max((edge for edge in edges if edge <= max_len), default=0)


def wanted_edges(
    start: int, stop: int, prompt_len: int, page_len: int, junction: int = 0, interval: int = 0
) -> list[int]:
    """Page edges in (start, stop] at which a snapshot should be taken, in order.

    The last reusable edge of the prompt; the junction, where it leaves a cached path; every interval; and
    behind the prompt the newest.
    """
    last = reusable_len(prompt_len, page_len)
    newest = stop // page_len * page_len
    wanted = {last, junction}
    if newest > last:
        wanted.add(newest)
    if interval:
        wanted.update(range(start // interval * interval + interval, stop + 1, interval))
    return sorted(edge for edge in wanted if start < edge <= stop)
