"""What an engine's segments are called with: the inputs by name, and how wide each can become.

Letters: T tokens, N rows, W pages of a row, L logits that are wanted, F the hidden size. All are int32 but
`hidden`. `rows` is described in plugins/rows.py; row n's token at position p stands in page
page_table[n, p // page_len].
"""

from hemiola.runtime.config import Resolved
from hemiola.runtime.outline import Limits

INPUTS = {
    "trunk": {"token_ids": "T", "positions": "T", "rows": "N8", "page_table": "NW", "logits_ids": "L"},
    "draft": {
        "token_ids": "T",
        "hidden": "TF",  # the trunk's, or the head's own, before each token
        "positions": "T",
        "rows": "N8",
        "page_table": "NW",
        "logits_ids": "L",
    },
}
# [L, V] fp32; and after the final norm [T, F], or [L, F] of the lines that have logits: in a draft segment,
# and in a trunk's program for steps that draft nothing (Segment.lines_file).
OUTPUTS = ("logits", "hidden")


def widths(config: Resolved | Limits, segment: str) -> dict[str, int]:
    """By letter, the most that a step of a running engine can have.

    A drafting head also reads what it was spared, up to a chunk of each row, and has one logit of a row.
    """
    drafting, rows = segment == "draft", config.max_rows
    return {
        "T": config.max_step_tokens + drafting * rows * max(config.chunk_len - 1, 1),
        "N": rows,
        "W": -(-config.max_len // config.page_len),
        "L": rows if drafting else rows * (1 + config.num_drafts),
    }
