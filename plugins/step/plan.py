"""A step's plan, as every op around the trunk reads it: `plan` [N + 1, 10] int32, one line per row and one
more.

The first four columns are cumulative: row n owns the tokens plan[n].token .. plan[n + 1].token of the step,
and so the lines of logits, the pairs that the drafting head reads, and the line of the head that drafts for
it (none or one). A row without lines chooses no token in this step. The last num_drafts of its tokens are
drafts, at most: the ledger knows how many there are. Padding rows have slot 0 and own nothing; every line
behind the last row holds the ends. Items behind the ends belong to nobody: ids, positions and places of them
are zero.

The ledger is `lengths` [4, S] int64 and `ids` [S, W] int32, by slot. Lengths are in tokens: of the text, of
what is committed of it, of the edge where the slot's state stands; and the number of drafts behind the text.
Slot 0 is never written.
"""

from typing import NamedTuple


class PlanFields(NamedTuple):
    """The columns of `plan`."""

    token: int  # the first one
    line: int  # of logits, the first one
    pair: int  # the first one; pairs are those of the tokens, one place later, behind `owed` earlier ones
    draft: int  # the head's line that drafts for the row
    slot: int
    num_drafts: int  # to be judged, at most
    room: int  # drafts that may be proposed for the next step
    owed: int  # pairs of earlier steps, which the head reads now
    snapshot_slot: int  # plugins/rows.py
    snapshot_edge: int


COLUMNS = PlanFields._fields
TOTAL, COMMITTED, EDGE, DRAFTS = range(4)  # of lengths
# What the host reads of each row, behind its tokens: drafts that were accepted, drafts that were judged,
# whether the logits of the last token were broken, drafts of the next step; then their ids, where it asks.
ACCEPTED, JUDGED, BROKEN, PROPOSED = range(4)
ANSWERS = 4
