"""Whether requests, their slots and their pages add up."""

from collections.abc import Sequence

from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.config import Resolved
from hemiola.runtime.schedule.request import Request


def audit(
    running: Sequence[Request],
    waiting: Sequence[Request],
    fetching: Sequence[Request],
    prefix: PrefixCache,
    config: Resolved,
) -> None:
    """Pages, slots and requests add up."""
    held = [*running, *waiting, *fetching]
    assert len(held) == len(set(held)), "a request runs or waits twice"
    slot_ids = {request.slot_id for request in running}
    assert len(slot_ids) == len(running) <= config.max_rows, "two requests in one slot"
    assert 0 not in slot_ids, "a request runs without a slot"
    prefix.audit()
    for requests in (running, waiting):
        ranks = [request.rank for request in requests]
        assert ranks == sorted(ranks), f"a worse rank overtook: {ranks}"
    for request in running:
        _audit_running(request, prefix, config)
    for request in (*waiting, *fetching):
        assert request.finish_reason is None, f"request {request.id} is finished and waits"
        assert request.committed_len == request.slot_id == request.in_flight == request.ahead == 0, (
            f"request {request.id} waits and holds"
        )


def _audit_running(request: Request, prefix: PrefixCache, config: Resolved) -> None:
    capacity = prefix.pages.capacity[request.slot_id]
    assert request.finish_reason is None or request.in_flight, f"request {request.id} is finished and runs"
    if request.finish_reason is not None or request.starts_anew:
        return
    assert 0 <= request.committed_len < request.total_len <= request.most_len <= len(request.ids)
    assert request.committed_len <= request.planned_len or request.planned_len == request.start_len
    assert request.most_len <= capacity, f"request {request.id} has pages for {capacity} tokens"
    assert request.ahead == 0 or request.in_flight, f"request {request.id} expects {request.ahead} tokens"
    assert request.guide is None or request.ahead <= 1 + config.num_drafts, "a grammar was overtaken"
    num_records = request.committed_len - prefix.slots.edge[request.slot_id]
    assert 0 <= num_records < config.chunk_len + config.num_drafts, f"{num_records} records"
