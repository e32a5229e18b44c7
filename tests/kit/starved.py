"""A starved storm: pages run out in most steps, and callers come and leave at the worst moments.

For a row that gets no page, because a cancelled request is still in a step, so often that no step has it
when a better request takes its place, while a worse one waits.
"""

import random

from hemiola.runtime.schedule.request import Request
from hemiola.runtime.schedule.scheduler import Scheduler


def sizes(dice: random.Random) -> dict[str, int | bool]:
    """Each token needs a page, and the pages are little more than those of one request of max_len."""
    max_rows, max_len = dice.choice([6, 9]), dice.choice([16, 24])
    return {
        "max_rows": max_rows,
        "max_len": max_len,
        "page_len": 1,
        "chunk_len": 1,
        "max_step_tokens": dice.choice([32, 64]),
        "num_pages": max_len + 1 + dice.choice([0, 3, 6]),
        "num_drafts": 0,
        "num_slots": max_rows + 1,
        "snapshot_interval": 0,
        "pipeline_depth": dice.choice([1, 1, 2]),
        "aging_s": 0.0,
    }


def last_rests(scheduler: Scheduler) -> bool:
    """The last of rank decodes, and no step has it."""
    return any(r.in_flight == 0 and r.total_len > r.start_len for r in scheduler.running[-1:])


def better_comes(dice: random.Random, scheduler: Scheduler) -> bool:
    """A request of the best priority: when the last row rests, or at times when there are pages for it."""
    has_pages = scheduler.prefix.num_available > len(scheduler.running) + 2
    return last_rests(scheduler) or (has_pages and dice.random() < 0.2)


def leaves(scheduler: Scheduler) -> list[Request]:
    """When pages are about to run out: one in a step that holds the fewest, but not the last of rank."""
    capacity = scheduler.prefix.pages.capacity
    going = [r for r in scheduler.running if r.finish_reason is None]
    if sum(r.most_len >= capacity[r.slot_id] for r in going) <= scheduler.prefix.num_available:
        return []
    return sorted((r for r in going[:-1] if r.in_flight), key=lambda r: capacity[r.slot_id])[:1]
