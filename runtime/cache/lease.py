"""What the cache tells a request, and what it remembers of one that runs."""

from dataclasses import dataclass, field
from typing import NamedTuple

from hemiola.runtime.cache.edges import reusable_len
from hemiola.runtime.cache.tree import Chain, Entry


class Start(NamedTuple):
    """Where an admitted request begins."""

    slot_id: int
    hit_len: int
    restore_from: int  # the slot to copy to slot_id before the step; 0: none
    load: int = 0  # the mark of what comes from the host's memory for it (see Tier.load); 0: nothing does


class Take(NamedTuple):
    """A snapshot that a step is to store."""

    slot_id: int
    edge: int


@dataclass(eq=False, slots=True)
class Lease:
    """What the cache remembers of a running request."""

    chain: Chain
    prompt_len: int  # tokens known when it was admitted
    junction: int  # where it leaves a cached path that has no snapshot there; 0: nowhere
    path: list[Entry]  # its cached pages, from the first on
    unproven: list[
        tuple[Entry, int]
    ]  # snapshots that it began from or stored until it is proven, their numbers
    stale: bool  # publishes nothing more
    loaded: bool = False  # it began from what the host's memory keeps
    swapped: list[tuple[Entry, int]] = field(default_factory=list)  # unproven, got for its own; in which step
    taken: list[Take] = field(default_factory=list)  # asked for, and not known to be stored
    newest: Entry | None = None  # has its last decode snapshot
    proven: bool = False  # it has chosen a token that was no NaN

    def kind_of(self, edge: int, page_len: int, interval: int) -> str:
        """Why a snapshot is taken at an edge."""
        last = reusable_len(self.prompt_len, page_len)
        if edge == self.junction:
            return "junction"
        if edge == last:
            return "prompt"
        return "decode" if edge > last and not (interval and edge % interval == 0) else "interval"
