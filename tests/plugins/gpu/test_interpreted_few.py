"""delta's one launch for few rows, interpreted: all that it writes is what two launches write.

Programs run one after the other, forwards or backwards: one that overwrites what another still reads shows.
"""

import os
from typing import Any

import pytest
import torch
from kit.ops import Subject, int32, same_bits, subject

from hemiola.plugins.delta.cuda import TilePlan, choose, delta

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

TWO = TilePlan(16, 1, 1, 1, 16, 1, 1, 3, 1, 0, 5, False)
NUM_DRAFTS = 3
# tokens, drafts, committed, edge, an edge to keep: in chunks of 16
ROWS = {
    "stays": [
        (1, 0, 0, 0, 0), (4, 3, 0, 0, 0), (1, 0, 37, 32, 0), (4, 3, 35, 32, 0), (4, 3, 44, 32, 48),
        (0, 0, 40, 32, 0),
    ],
    "passes": [
        (1, 0, 47, 32, 48), (4, 3, 47, 32, 48), (3, 1, 46, 32, 0), (4, 3, 45, 32, 48), (4, 3, 14, 0, 0),
        (1, 0, 30, 16, 0),
    ],
    "comes round": [(4, 3, 50, 32, 48), (2, 1, 50, 32, 0), (4, 3, 34, 16, 32), (13, 3, 50, 32, 48)],
    "long": [(20, 0, 5, 0, 16)],
}  # fmt: skip
SUBJECTS = [
    (subject("delta", G=1, K=16, H=2, V=32, J=1), 16, (16, 2)),
    (subject("delta", G=2, K=32, H=4, V=16, J=1), 16, (16, 1)),
    (subject("delta", G=1, K=16, H=1, V=80, J=1), 16, (32, 3)),
    (subject("delta", G=1, K=16, H=2, V=32, J=16), 16, (32, 1)),
    (subject("delta", G=1, K=16, H=2, V=32, J=1), 32, (16, 1)),
]
CASES = [(*it, "passes", "forwards") for it in SUBJECTS]
CASES += [(*it, "comes round", "backwards") for it in SUBJECTS[::2]]
CASES += [
    (*it, kind, "forwards") for it, kind in zip(SUBJECTS, ("comes round", "stays", "long"), strict=False)
]


def step(it: Subject, kind: str, chunk_len: int) -> list[Any]:
    """A call whose slots are NaN but for what their rows may read."""
    scale, lines, first = chunk_len // 16, [], 2  # the first two tokens are nobody's
    for slot, (num, drafts, committed, edge, kept) in enumerate(ROWS[kind], 1):
        committed += edge * (scale - 1) + (16 * (scale - 1) if committed - edge >= 10 else 0)
        keeps = len(ROWS[kind]) + slot if kept else 0
        lines.append((first, num, drafts, slot, committed, edge * scale, keeps, kept * scale))
        first += num
    lines.insert(1, (0, 7, 1, 0, 99, 5, 1, 16))  # padding
    torch.manual_seed(len(lines))
    tokens, (dt_bias, A) = it.tokens(first, 1), it.constants()
    q, k, v, a, b = (token.bfloat16() for token in tokens)
    slots = [t.bfloat16() if at in (1, 2) else t
             for at, t in enumerate(it.states(2 * len(lines) + 1, chunk_len, NUM_DRAFTS))]  # fmt: skip
    for _, _, _, slot, committed, edge, _, _ in lines:
        if slot:
            places = [at % slots[1].shape[1] for at in range(edge, committed)]
            for held in slots[1:]:
                held[slot, places] = torch.randn(len(places), *held.shape[2:]).to(held.dtype)
            slots[3][slot, places], slots[4][slot, places] = -slots[3][slot, places].abs(), 0.5
        if slot and edge:
            slots[0][slot] = torch.randn(slots[0].shape[1:])
    return [q, k, v, a, b, dt_bias, A, *slots, int32(*lines).view(-1, 8), chunk_len]


def run(given: list[Any], plan: TilePlan) -> list[torch.Tensor]:
    """Outputs and all that slots hold then."""
    own = [value.clone() if 7 <= at < 12 else value for at, value in enumerate(given)]
    vars(own[7])["tickets"] = tickets = torch.zeros(own[7].shape[0] * own[8].shape[2], dtype=torch.int32)
    made = delta(*own, plan=plan)
    assert not tickets.any(), "the next launch would count on"
    return [made, *own[7:12]]


@pytest.mark.parametrize(("it", "chunk_len", "tiles", "kind", "order"), CASES, ids=str, indirect=["order"])
def test_one_launch_writes_what_two_write(
    it: Subject, chunk_len: int, tiles: tuple[int, int], kind: str, order: None, poisoned_empty: None
) -> None:
    given = step(it, kind, chunk_len)
    few = TWO._replace(channels=tiles[0], tiles=tiles[1], few=True)
    names = ("o", "state", "k_records", "v_records", "g_records", "beta_records")
    for name, one, two in zip(names, run(given, few), run(given, TWO), strict=True):
        assert same_bits(one, two), f"{name} differs in {(one != two).sum().item()} numbers"


def test_few_rows_have_one_launch_unless_they_bring_many_tokens() -> None:
    assert all(choose(rows, rows, 32, 128, 1, 2048).few for rows in (1, 32))
    assert all(choose(tokens, 4, 32, 128, 1, 2048).few for tokens in (5, 16, 63))
    assert not choose(16, 1, 32, 128, 1, 2048).few and not choose(64, 4, 32, 128, 1, 2048).few
    assert not choose(6, 5, 32, 128, 1, 2048).few and not choose(33, 33, 32, 128, 1, 2048).few
    assert not choose(1, 1, 32, 128, 128, 2048).few, "a decay per channel: never timed"
