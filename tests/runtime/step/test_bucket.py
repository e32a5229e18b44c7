"""Steps of fixed sizes: every step that decodes has one, and none is larger than the engine allows.

That they compute what steps of free sizes do is a case of test_matrix_pairs.py and test_engine_storms.py.
"""

import random
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.fake_session import VOCAB, OneRank, resolved

from hemiola.plugins.step.plan import PlanFields
from hemiola.runtime.abi import widths
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.device.session import Computed
from hemiola.runtime.schedule.plan import Plan, Row
from hemiola.runtime.step import bucket as buckets
from hemiola.runtime.step.bucket import (
    Bucket,
    Buckets,
    Sent,
    buckets_of,
    num_changes,
    num_words,
    send,
    shapes_of,
)
from hemiola.runtime.step.captured import Captured
from hemiola.runtime.step.pack import pack
from hemiola.runtime.step.record import StepRecord, packed, unpacked
from hemiola.runtime.step.steps import make_steps

SIZES = {"max_len": 256, "page_len": 16, "chunk_len": 16}
CONFIGS = [
    resolved(drafts=drafts, num_drafts=num, max_rows=rows, max_step_tokens=tokens, num_pages=50, **SIZES)
    for drafts, num in (("none", 0), ("ngram", 3), ("ngram", 64), ("mtp", 1), ("mtp", 5))
    for rows, tokens in ((1, 70), (5, 70), (64, 2048), (1024, 2048), (1500, 1500))
]
ADAPTIVE = [
    config.model_copy(update={"adaptive_drafts": True}) for config in CONFIGS if config.drafts == "mtp"
]
PLAIN: dict[str, Any] = {}


def a_row(num_drafts: int = 0, slot: int = 1, values: dict = PLAIN, words: Any = (), **changes: Any) -> Row:
    rule = Rule(SamplingParams(**values), 0, 1, frozenset(), words)
    request: Any = SimpleNamespace(rule=rule, guide=None, params=rule.params)
    row = Row(request, slot, 1 + num_drafts, num_drafts, True, 0, (0, 0))
    for name, value in changes.items():
        setattr(row, name, value)
    return row


def some_rows(config: Any, dice: random.Random) -> list[Row]:
    """As the scheduler makes them."""
    left = config.max_step_tokens
    rows = []
    for slot in range(1, dice.randint(1, config.max_rows) + 1):
        num = dice.choice([0, 0, 1, config.num_drafts])
        num = min(num, config.num_drafts, left - (config.max_rows - slot) - 1)
        owed = dice.choice([0, dice.randrange(config.chunk_len)]) if num == 0 else 0
        room = dice.choice([0, min(1, config.num_drafts), config.num_drafts])
        rows.append(a_row(max(num, 0), slot, owed=owed, room=room, reads=dice.random() < 0.5))
        left -= rows[-1].num_tokens
    return rows


@pytest.mark.parametrize(
    "config", [*CONFIGS, *ADAPTIVE], ids=lambda c: f"{c.drafts} {c.num_drafts}, {c.max_rows} rows"
)
def test_every_step_that_decodes_has_a_bucket_within_the_engines_widths(config: Any) -> None:
    dice, fit = random.Random(1), Buckets(config)
    trunk, head = widths(config, "trunk"), widths(config, "draft")
    for bucket in buckets_of(config):
        assert bucket.tokens <= trunk["T"] and bucket.pairs <= head["T"] and bucket.rows <= trunk["N"]
    for _ in range(60 if config.max_rows < 1000 else 12):
        plan = Plan(some_rows(config, dice))
        found = fit(plan)
        if 1024 < len(plan.rows) < plan.num_tokens:
            continue  # in a step of 1500 tokens is no room for gaps
        assert found is not None and found in buckets_of(config)
        assert len(plan.rows) <= found.rows and plan.num_tokens <= found.tokens
        assert max(row.room for row in plan.rows) <= found.passes
        numbers, _ = pack(plan.rows, config.drafts == "mtp").packed
        sent = send(numbers, found, np.array([[7, 9]]), 4, {})
        for array, (shape, dtype) in zip(sent, shapes_of(found, VOCAB), strict=True):
            assert array.shape == shape and array.dtype == dtype
        assert sent.changes.tolist() == [[7, 9], *[[0, 0]] * (len(sent.changes) - 1)]
        _check_padding(plan, config.drafts == "mtp", sent)


def _check_padding(plan: Plan, has_head: bool, sent: Sent[np.ndarray]) -> None:
    """Items are those of live rows, in order; behind them are rows of the dump slot, which own nothing."""
    lines, num = [PlanFields(*line) for line in sent.plan.tolist()], len(plan.rows)
    for row, line, after in zip(plan.rows, lines, lines[1:], strict=False):
        assert (line.slot, line.num_drafts, line.room, line.owed) == (
            row.slot_id,
            row.num_drafts,
            row.room,
            row.owed,
        )
        assert after.token - line.token == row.num_tokens and after.line - line.line == 1 + row.num_drafts
        reads = has_head and row.reads
        assert after.pair - line.pair == (row.num_tokens + row.owed) * reads
        assert after.draft - line.draft == (reads and row.room > 0)
    assert lines[0][:4] == (0, 0, 0, 0) and len(set(lines[num:])) == 1 and not any(lines[num][4:])


def test_a_step_is_in_the_smallest_bucket_that_holds_it() -> None:
    config = CONFIGS[17]
    assert (config.drafts, config.max_rows) == ("mtp", 64)
    fit = Buckets(config)
    rows = [a_row(slot=n, reads=False) for n in range(1, 10)]
    assert fit(Plan(rows)) == Bucket(0, 16, 16, 0, 0)
    assert fit(Plan([a_row(1, 10, room=1), *rows])) == Bucket(0, 16, 32, 1, 32)
    assert fit(Plan([a_row(0, 10, owed=15), *rows])) == Bucket(0, 16, 16, 0, 256)
    for values, rules in (
        ({"temperature": 1.0, "min_p": 0.1}, buckets.DRAWN),
        ({"temperature": 1.0, "top_p": 0.9, "top_k": 1024}, buckets.DRAWN),
        ({"temperature": 1.0, "top_p": 0.9}, buckets.SORTED),
        ({"temperature": 1.0, "top_k": 1025}, buckets.SORTED),
        ({"temperature": 0.0, "top_p": 0.9}, buckets.GREEDY),
        ({"logprobs": 0}, buckets.ANY),
    ):
        assert fit(Plan([a_row(values=values, reads=False), *rows])) == Bucket(rules, 16, 16, 0, 0), values


def test_a_trial_of_one_draft_is_a_pass_behind_dense_rows_and_then_two_tokens_of_each() -> None:
    """Where drafts are adaptive; and the pairs of some rows are not padded to those of all."""
    (config,) = [config for config in ADAPTIVE if (config.max_rows, config.num_drafts) == (64, 5)]
    fit, slots = Buckets(config), range(1, 65)
    for row in (plain := [a_row(slot=n, reads=False) for n in slots]):
        row.owed = 9
    assert fit(Plan(plain)) == Bucket(0, 64, 64, 0, 0)
    assert fit(Plan([a_row(slot=n, owed=9, room=1) for n in slots])) == Bucket(0, 64, 64, 1, 1024)
    assert fit(Plan([a_row(1, n) for n in slots])) == Bucket(0, 64, 128, 1, 128)
    assert fit(Plan([a_row(1, n, room=1) for n in slots])) == Bucket(0, 64, 128, 1, 128)
    assert fit(Plan([a_row(1, n, room=2) for n in slots])) == Bucket(0, 64, 256, 5, 256)
    some = [a_row(slot=n, owed=15) for n in range(1, 9)]
    assert fit(Plan([*some, *plain[8:]])) == Bucket(0, 64, 64, 0, 128)
    assert fit(Plan([*some, a_row(slot=9), *plain[9:]])) == Bucket(0, 64, 64, 0, 1024)


def test_engines_without_adaptive_drafts_have_the_buckets_that_they_had() -> None:
    """Where they are adaptive, an MTP head has three kinds more for many rows."""
    for config in ADAPTIVE:
        always = buckets_of(config.model_copy(update={"adaptive_drafts": False}))
        assert set(always) < set(buckets_of(config))
    (config,) = [config for config in ADAPTIVE if (config.max_rows, config.num_drafts) == (64, 5)]
    kinds = {bucket[2:] for bucket in buckets_of(config) if bucket.rows == 64}
    always = {(64, 0, 0), (64, 0, 1024), (256, 5, 256), (256, 5, 1216), (384, 5, 384), (384, 5, 1344)}
    assert kinds == always | {(64, 1, 1024), (128, 1, 128), (64, 0, 128)}
    for config in CONFIGS:
        if config.drafts != "mtp":
            assert buckets_of(config.model_copy(update={"adaptive_drafts": True})) == buckets_of(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"chooses": False},
        {"num_tokens": 9},
        {"words": ((1,) * 450,)},
        {"values": {"logit_bias": dict.fromkeys(range(400), 1.0)}},
    ],
    ids=["a chunk of a prompt", "its end", "a long bad word", "many biases"],
)
def test_prompts_and_rules_beyond_the_tables_have_none(changes: dict) -> None:
    assert Buckets(CONFIGS[12])(Plan([a_row(), a_row(**changes)])) is None


def test_pages_that_came_since_the_last_step_reach_the_device_however_many() -> None:
    config = CONFIGS[1].model_copy(update={"cuda_graphs": True})
    pages = PagePool(config.num_pages, config.page_len, config.num_slots, 16)
    session: Any = OneRank()
    session.run = lambda batch: Computed(torch.zeros(5, VOCAB), torch.zeros(5, 1))
    cpu = torch.device("cpu")
    nothing: Any = None
    made = make_steps(config, nothing, session, pages, cpu, ExitStack())
    assert made.whole is not None
    for slot, num_tokens in ((1, 20), (2, 250), (1, 33), (1, 33), (3, 250), (4, 250)):
        pages.grow(slot, num_tokens)
        made.launch(Plan([a_row(0, slot)]))
        assert np.array_equal(made.table.on_device.numpy(), pages.table)
    assert num_changes(1) < 250 // 16, "more than go over with a step"
    pages.release(1)
    pages.grow(1, 5)
    assert made.table.changes().tolist() == [[16, pages.table[1, 0]]]


def test_every_request_that_no_graph_holds_writes_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = CONFIGS[0].model_copy(update={"cuda_graphs": True})
    pages, nothing = PagePool(config.num_pages, config.page_len, config.num_slots, 16), OneRank()
    steps = make_steps(config, nothing, nothing, pages, torch.device("cpu"), ExitStack())  # type: ignore
    for slot_id, count in ((1, 64), (1, 65), (1, 65)):
        rule = a_row(words=[[n] for n in range(count)]).rule
        steps.open(slot_id, np.array([1], np.int32), 0, rule)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_follower_puts_into_a_bucket_what_its_leader_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number for number, masks of grammars and padding, too, and without a row."""
    config = CONFIGS[16].model_copy(update={"cuda_graphs": True, "num_drafts": 2})
    seen: list[tuple[Bucket, list[Any]]] = []

    def run(self: Captured, bucket: Bucket) -> Any:
        seen.append((bucket, [view.tolist() for view in self._stage.views(self.shapes(bucket))]))
        return SimpleNamespace(told=torch.zeros(1), logprobs=())

    monkeypatch.setattr(Captured, "run", run)
    monkeypatch.setattr(Captured, "_output", lambda *_: None)
    pages = PagePool(config.num_pages, config.page_len, config.num_slots, 16)
    nothing: Any = OneRank()
    nothing.tensors = {"mtp.hidden": torch.zeros(1, 1)}
    made = [make_steps(config, nothing, nothing, pages, torch.device("cpu"), ExitStack()) for _ in range(2)]
    rows = [a_row(2, 3, room=2), a_row(1, 1), a_row(2, 2, owed=3), a_row(2, 5)]
    for n in (1, 2):
        words = num_words(config.vocab_size)
        rows[n].request.guide = SimpleNamespace(masks=np.full((4, words), 7 + n, np.uint32))
    plan = Plan(rows)
    leader, follower = made
    ready, fitted = leader.ready(plan), leader.fit(plan)
    assert isinstance(fitted, Bucket) and fitted.rules == buckets.ANY
    leader.launch_as(plan, ready, fitted)
    changes = np.zeros((0, 2), np.int64)
    record = unpacked(packed(StepRecord(1, [], ready, fitted, changes, {}, True, False)))
    assert isinstance(record, StepRecord) and record.slot_ids == [3, 1, 2, 5]
    follower.repeat(record.ready, record.fitted, lambda: pytest.fail("it needs no rows"))
    assert len(seen) == 2 and seen[0] == seen[1]
    assert seen[0][1][2] == [0, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 0], "lines of masks, by token"
