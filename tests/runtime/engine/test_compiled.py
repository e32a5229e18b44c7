"""What is compiled around a CPU's engine: the numbers of the functions that a GPU runs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hemiola.plugins.cpu.code import EAGER
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.engine import compiled
from hemiola.runtime.engine.drafts.ngram import lookup
from hemiola.runtime.engine.feed import Feed
from hemiola.runtime.engine.judge import judge
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.step import Plan, Row, Verdict

SLOTS, WIDTH, VOCAB, CHUNK = 7, 40, 37, 4
INF, NAN = float("inf"), float("nan")


def ledger(rng: torch.Generator) -> Ledger:
    made: Any = Ledger(SimpleNamespace(num_slots=SLOTS, max_len=WIDTH - 4, num_drafts=3), torch.device("cpu"))  # type: ignore[arg-type]
    made.ids[1:] = torch.randint(3, (SLOTS - 1, WIDTH), generator=rng, dtype=torch.int32)
    made.total_len[1:] = torch.randint(10, WIDTH - 5, (SLOTS - 1,), generator=rng)
    made.num_drafts[1:] = torch.randint(4, (SLOTS - 1,), generator=rng)
    return made


def columns(of: Ledger) -> list[torch.Tensor]:
    return [of.ids, of.total_len, of.committed_len, of.edge, of.num_drafts]


def same(mine: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(mine.to(wanted.dtype).nan_to_num(nan=7e30), wanted.nan_to_num(nan=7e30))
    if isinstance(wanted, dict):
        return mine.keys() == wanted.keys() and all(same(mine[key], wanted[key]) for key in wanted)
    if isinstance(wanted, tuple):
        return len(mine) == len(wanted) and all(map(same, mine, wanted))
    if not hasattr(wanted, "__dataclass_fields__"):
        return mine == wanted
    return all(same(getattr(mine, name), getattr(wanted, name)) for name in wanted.__dataclass_fields__)


def plan(rng: torch.Generator, known: Ledger, params: SamplingParams) -> Plan:
    """Rows that decode with drafts, that begin a prompt, and that end one."""
    rows = []
    for slot in torch.randperm(SLOTS - 1, generator=rng)[:4].tolist():
        kind, drafts = torch.randint(4, (2,), generator=rng).tolist()
        total = int(known.total_len[slot + 1])
        drafts = drafts if kind else 0
        left = [5, 1, 1, 3][kind]
        known.committed_len[slot + 1] = total - left
        known.edge[slot + 1] = (total - left) // CHUNK * CHUNK
        num_tokens = (left if kind else 2) + drafts
        guide = SimpleNamespace(masks=[np.array([0b10101, 0b111], np.uint32)] * 4) if kind == 2 else None
        request: Any = SimpleNamespace(rule=Rule(params, 7, 3, frozenset()), guide=guide)
        rows.append(Row(request, slot + 1, num_tokens, drafts, bool(kind), 0, (0, 0)))
    return Plan(rows)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0, logprobs=2), SamplingParams(temperature=0.7)],
    ids=["greedy", "drawn"],
)
@pytest.mark.parametrize("seed", range(12))
def test_a_batch_and_its_verdict_are_those_of_any_device(seed: int, params: SamplingParams) -> None:
    rng = torch.Generator().manual_seed(seed)
    mine, pages = ledger(rng), SimpleNamespace(table=np.arange(SLOTS * 3, dtype=np.int32).reshape(SLOTS, 3))
    made = plan(rng, mine, params)
    other: Any = Ledger.__new__(Ledger)
    other.__dict__ |= {
        name: getattr(value, "clone", lambda v=value: v)() for name, value in vars(mine).items()
    }
    feed: Any = Feed(pages, other)  # type: ignore[arg-type]
    batch, wanted = compiled.fill(made, pages.table, mine), feed.fill_anywhere(made)
    assert same(batch, wanted)
    logits = torch.randint(5, (len(batch.logits_ids), VOCAB), generator=rng).float()
    logits[torch.rand(logits.shape, generator=rng) < 0.02] = NAN
    found: Verdict = compiled.judge(batch, logits.clone(), mine, CHUNK)
    assert same(found, judge(wanted, logits, other, CHUNK))
    for a, b in zip(columns(mine), columns(other), strict=True):
        assert torch.equal(a, b)


LINES = {
    "the first of equals": ([1.0, 3.0, 3.0, 2.0], 1, 0),
    "the first NaN": ([1.0, NAN, 9.0, NAN], 1, 1),
    "infinity": ([1.0, INF, 9.0, INF], 1, 1),
    "NaN behind infinity": ([1.0, INF, NAN, 2.0], 2, 1),
    "minus infinity is no best": ([-INF, -INF, -9.0, -INF], 2, 0),
    "nothing": ([-INF, -INF, -INF, -INF], 0, 1),
    "zeros of both signs": ([-1.0, -0.0, 0.0, -2.0], 1, 0),
}


@pytest.mark.parametrize("case", LINES)
@pytest.mark.parametrize("padding", [0, 12, 16, 50])
def test_the_best_token_of_a_line(case: str, padding: int) -> None:
    values, token, broken = LINES[case]
    for before in (0, padding):
        line = [-100.0] * before + values + [-100.0] * (padding - before)
        if case == "nothing":
            line = [-INF] * len(line)
        chosen, bad = compiled.best(torch.tensor([line, line]))
        assert chosen.tolist() == torch.tensor([line, line]).argmax(1).tolist()
        assert bad.tolist() == [broken] * 2 and (case == "nothing" or chosen[0] == token + before)


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=3)


@given(TEXTS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 5), st.integers(0, 10**6))
def test_prompt_lookup_finds_what_it_finds_on_any_device(
    texts: list[list[int]], min_n: int, more: int, room: int, seed: int
) -> None:
    known: Any = ledger(torch.Generator().manual_seed(seed))
    for slot, text in enumerate(texts, 1):
        known.ids[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        known.total_len[slot] = len(text)
    slots = torch.arange(1, len(texts) + 1)
    drafts, found = lookup(known.ids[slots], known.total_len[slots], min_n, min_n + more, room)
    asked = torch.zeros(len(texts), compiled.ASKED, dtype=torch.int64)
    asked[:, compiled.OWN], asked[:, compiled.ROOM] = slots, room
    compiled.look_up(asked, compiled.Columns.of(EAGER, known), min_n, min_n + more)
    for n, text in enumerate(texts):
        num = int(known.num_drafts[n + 1])
        assert num == room * found[n]
        assert known.ids[n + 1, len(text) : len(text) + num].tolist() == drafts[n, :num].tolist()
