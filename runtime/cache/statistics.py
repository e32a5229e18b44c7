"""What the prefix cache counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class Statistics:
    """Counts since the start."""

    num_queries: int = 0
    num_hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    page_hit_tokens: int = 0  # whose pages were there; in an engine with recurrences not always a state
    num_snapshots: int = 0  # taken
    refused_snapshots: int = 0  # not taken, because all others were worth more
    evicted_snapshots: int = 0  # for another snapshot or for a request
    stranded_snapshots: int = 0  # evicted with their page
    evicted_pages: int = 0
