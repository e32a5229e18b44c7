"""What an engine holds, as Dynamo's router and metrics read it."""

from dataclasses import dataclass

from hemiola.runtime.api import Load
from hemiola.runtime.cache.statistics import Statistics


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Fields are Dynamo's; a block is a page."""

    kv_used_blocks: int  # held by requests: what is kept for later prompts gives way
    kv_total_blocks: int
    gpu_cache_usage: float
    kv_cache_hit_rate: float | None  # None: nothing was asked
    dp_rank: int = 0

    @classmethod
    def of(cls, load: Load, reuse: Statistics) -> "Snapshot":
        used = load.num_pages - load.num_free_pages - load.num_idle_pages
        used = max(0, used)  # a page may be freed, and cached, between the two counts
        rate = reuse.hit_tokens / reuse.query_tokens if reuse.query_tokens else None
        return cls(used, load.num_pages, used / max(1, load.num_pages), rate)
