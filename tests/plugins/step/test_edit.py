"""Compiled edits of logits are the reference's, bit for bit, whatever their rules and lines are."""

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import redzones
from kit.ops import same_bits

from hemiola.plugins.cpu import kernel
from hemiola.plugins.step import STEP_OPS
from hemiola.runtime.api import MAX_ENTRIES, SamplingParams
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.choose.rules import Edits, RuleTable, edits_of

INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")
EDIT = STEP_OPS["edit"]
V, W, PROMPT = 50, 40, 6
pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs without TRITON_INTERPRET=1"),
]


def rule(
    *, words: tuple[tuple[int, ...], ...] = (), stops: tuple[int, ...] = (), prompt_len: int = PROMPT, **own
) -> Rule:
    return Rule(SamplingParams(max_tokens=100, **own), 0, prompt_len, frozenset(stops), words)


RULES = [
    rule(),
    rule(repetition_penalty=1.3),
    rule(repetition_penalty=1e-320),
    rule(repetition_penalty=1e300, presence_penalty=-2.0),
    rule(frequency_penalty=-0.3),
    rule(frequency_penalty=1.1, presence_penalty=0.7, prompt_len=0),
    rule(logit_bias={0: -100.0, 7: 1e300, 9: -1e300, V - 1: 0.125}),
    rule(logit_bias={0: -0.0}),
    rule(min_tokens=10, stops=(0, 3, V - 1)),
    rule(min_tokens=11, stops=(2,)),
    rule(words=((4,), (1, 5), (2, 2, 6), (1, 2, 8), (0, V - 1))),
    rule(words=tuple((n,) for n in range(V)), logit_bias={3: 5.0}),
    rule(words=((7,) * 30, (3,) * 12, (2,) * (W + 9)), repetition_penalty=0.5, min_tokens=90, stops=(1,)),
]


def text(num_slots: int, length: int, seed: int = 0, few: int = 4) -> torch.Tensor:
    """Of few tokens, so that bad words are written; behind it stands poison."""
    ids = torch.full((num_slots, W), -(2**31), dtype=torch.int32)
    rng = torch.Generator().manual_seed(seed)
    ids[:, :length] = torch.randint(few, (num_slots, length), generator=rng, dtype=torch.int32)
    return ids


def edited(form: str, values: list) -> torch.Tensor:
    EDIT.check(*values)
    with redzones.given(list(values), [False] * len(values)) as given_:
        return EDIT.bind(form, ())(*given_)


def check(scores: torch.Tensor, edits: Edits, position: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    slot = torch.arange(len(scores)).flip(0) % len(ids)
    values = [scores, *edits, slot, position, ids]
    before = scores.clone()
    mine, wanted = edited("compiled", values), EDIT.reference(*values)
    assert same_bits(scores, before)
    assert mine.isnan().equal(wanted.isnan())
    assert same_bits(mine.nan_to_num(7.0, INF, -INF), wanted.nan_to_num(7.0, INF, -INF))
    return mine


def lines(num: int, size: int = V, seed: int = 0) -> torch.Tensor:
    scores = torch.randn(num, size, generator=torch.Generator().manual_seed(seed)) * 3
    scores[:, ::7], scores[:, 1::11], scores[:, 5::13] = 0.0, -0.0, -INF
    return scores


@pytest.mark.parametrize("own", RULES, ids=lambda rule: f"{rule.params!s:.60}")
@pytest.mark.parametrize("length", [PROMPT, PROMPT + 1, PROMPT + 10, W])
def test_every_rule_edits_as_the_reference(own: Rule, length: int) -> None:
    for seed in range(4):
        check(
            lines(3, seed=seed), edits_of([own] * 3, CPU), torch.tensor([length] * 3), text(3, length, seed)
        )


@pytest.mark.parametrize("length", [PROMPT, PROMPT + 10, W])
@pytest.mark.parametrize("tables", ["as wide as they need", "of all slots"])
def test_rules_beside_each_other(length: int, tables: str) -> None:
    """Their lists are filled up to the longest."""
    rules = [own for own in RULES if tables == "as wide as they need" or RuleTable.holds(own)]
    edits = edits_of(rules, CPU)
    if tables == "of all slots":
        table = RuleTable(len(rules), CPU)
        for slot, own in enumerate(rules):
            table.open(slot, own)
        found = table.group(torch.arange(len(rules)), True, 0).edits
        assert found is not None
        edits = found
    position = torch.arange(len(rules)) % 3 + length - 2
    check(lines(len(rules)), edits, position, text(len(rules), W))


@pytest.mark.parametrize("size", [1, 2, 4096, 2**17 + 1])
@pytest.mark.parametrize("num_lines", [0, 1, 65])
def test_vocabularies_and_lines_of_every_size(size: int, num_lines: int) -> None:
    num_lines = min(num_lines, 3) if size > 4096 else num_lines
    far = (size - 1) // 2
    rules = [
        rule(logit_bias={far: 2.0}, repetition_penalty=1.2),
        rule(words=((size - 1,), (0, far)), frequency_penalty=0.5),
        rule(min_tokens=50, stops=(size - 1,)),
    ]
    own = [rules[n % 3] for n in range(num_lines)] or rules
    edits = Edits._make(value[:num_lines] for value in edits_of(own, CPU))
    ids = text(max(num_lines, 1), W, few=min(size, 9))
    check(lines(num_lines, size), edits, torch.full((num_lines,), PROMPT + 4), ids)


def test_the_dearest_lists() -> None:
    stops = tuple(range(2000, 2000 + MAX_ENTRIES))
    words = tuple((n % 3, n % 2, n) for n in range(1000))
    own = rule(
        words=words, stops=stops, min_tokens=99, logit_bias=dict.fromkeys(range(MAX_ENTRIES), -1.0),
        presence_penalty=0.1,
    )  # fmt: skip
    check(
        lines(2, 4096), edits_of([own, rule(logit_bias={3: 1.0})], CPU), torch.tensor([30, 30]), text(2, 30)
    )


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_a_broken_line_leaves_the_others_as_they_are(broken: float) -> None:
    scores, position, ids = lines(len(RULES)), torch.full((len(RULES),), 20), text(len(RULES), 20)
    wanted = check(scores, edits_of(RULES, CPU), position, ids)
    scores[1::3] = broken
    found = check(scores, edits_of(RULES, CPU), position, ids)
    untouched = torch.arange(len(RULES)) % 3 != 1
    assert same_bits(found[untouched], wanted[untouched])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_edit_does_not_depend_on_other_lines_or_threads(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(kernel, "usual_threads", lambda: num_threads)
    scores, ids = lines(len(RULES), 4099), text(len(RULES), W)
    slot, position = torch.arange(len(RULES)), torch.full((len(RULES),), 30)
    values = [scores, *edits_of(RULES, CPU), slot, position, ids]
    together = edited("compiled", values)
    for n, own in enumerate(RULES):
        part = slice(n, n + 1)
        alone = [scores[part], *edits_of([own], CPU), slot[part], position[part], ids]
        assert same_bits(edited("compiled", alone), together[part])


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_rules_and_any_text(data: st.DataObject) -> None:
    draw: Callable = data.draw
    token = st.integers(0, 8)
    own = st.builds(
        lambda words, stops, bias, repetition, other: rule(
            words=tuple(words), stops=tuple(stops), min_tokens=other[2], logit_bias=bias,
            repetition_penalty=repetition, presence_penalty=other[0], frequency_penalty=other[1],
        ),
        st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), max_size=4),
        st.lists(token, max_size=3),
        st.dictionaries(token, st.floats(-1e39, 1e39), max_size=3),
        st.floats(1e-3, 1e3),
        st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 30)),
    )  # fmt: skip
    rules = draw(st.lists(own, min_size=1, max_size=4))
    numbers = st.one_of(
        st.sampled_from([-INF, -0.0, 0.0, 1.0, 3.4e38, -3.4e38]), st.floats(-20, 20, width=32)
    )
    scores = torch.tensor([draw(st.lists(numbers, min_size=9, max_size=9)) for _ in rules])
    length = draw(st.integers(PROMPT, W))
    check(scores, edits_of(rules, CPU), torch.full((len(rules),), length), text(len(rules), length))
