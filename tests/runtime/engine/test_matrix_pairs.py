"""All pairs of values of the matrix's axes, in a few dozen cases on real tiny engines.

test_matrix.py says what every case asks.
"""

import itertools
import random
from collections.abc import Callable

import pytest
from kit.engine_hand import SMALL, VOCAB, EngineHand, Wanted, right_and_wrong
from kit.proposers import Scripted

AXES: dict[str, list] = {
    "family": ["nemotron_h_moe", "qwen3_5", "three_convs", "attention_only"],
    "drafts": ["off", "ngram", "mtp 1", "mtp 3", "scripted 3", "scripted all", "random"],
    "engine": ["wide", "small"],  # K 5; small pages and chunks, K 19
    "cache": ["off", "auto", "two snapshots", "every page"],
    "batch": [1, 3, 6],
    "chunk": ["one shot", "less than a chunk", "a page and one"],
    "pages": ["plenty", "scarce"],
    "preempt": ["never", "often"],
    "abort": ["never", "some"],
    "depth": [0, 1, 2],
    "steps": ["free", "in buckets"],  # of fixed sizes, as CUDA graphs have them
}
ENGINES = {
    "wide": {"page_len": 32, "chunk_len": 16, "num_drafts": 5},
    "small": SMALL,
}
Case = dict[str, object]


def all_pairs(axes: dict[str, list], seed: int = 0) -> list[Case]:
    """Few cases in which every value of every axis meets every value of every other; the same ones each time.

    Greedy: the best of some random cases, each built around a pair that is still missing.
    """
    dice = random.Random(seed)
    missing = {(a, x, b, y) for a, b in itertools.combinations(axes, 2) for x in axes[a] for y in axes[b]}
    cases: list[Case] = []
    while missing:
        tries = []
        for a, x, b, y in dice.sample(sorted(missing, key=str), min(40, len(missing))):
            case = {name: dice.choice(values) for name, values in axes.items()} | {a: x, b: y}
            tries.append((len(_pairs(case) & missing), len(tries), case))
        best = max(tries, key=lambda found: found[:2])[2]
        cases.append(best)
        missing -= _pairs(best)
    return cases


def _pairs(case: Case) -> set[tuple]:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(case, 2)}


CASES = all_pairs(AXES)


def name_of(case: Case) -> str:
    return "-".join(map(str, case.values()))


def test_the_cases_are_few_and_hold_all_pairs() -> None:
    assert len(CASES) <= 45
    for a, b in itertools.combinations(AXES, 2):
        assert {(case[a], case[b]) for case in CASES} == {*itertools.product(AXES[a], AXES[b])}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_pair_of_everything(engine_hands: Callable[..., EngineHand], wanted: Wanted, case: Case) -> None:
    dice = random.Random(str(case))
    hand = make(engine_hands, wanted, case, dice)
    family, page_len = str(case["family"]), hand.config.page_len
    asked: dict[int, list[int]] = {}
    doomed: list[int] = []
    arrivals = sorted((dice.randint(0, 25), dice.randrange(3)) for _ in range(8))
    for turn in itertools.count():
        while arrivals and (arrivals[0][0] <= turn or hand.idle):
            text = wanted.story(family, arrivals.pop(0)[1], 100)
            length = dice.choice([3, page_len - 1, page_len, page_len + 1, dice.randint(3, 2 * page_len + 9)])
            num_tokens = dice.randint(1, 14)
            request_id = hand.submit(text[:length], max_tokens=num_tokens)
            asked[request_id] = text[length : length + num_tokens]
            if case["abort"] == "some" and dice.random() < 0.3:
                doomed.append(request_id)
        hand.turn()
        running = hand.loop.scheduler.running
        if case["preempt"] == "often" and running and dice.random() < 0.25:
            hand.preempt(dice.choice(running))
        if doomed and dice.random() < 0.3:
            hand.loop.abort(doomed[0])
            doomed.append(doomed.pop(0))
        if dice.random() < 0.1:
            hand.check_contents()
        if hand.idle and not arrivals:
            break
    hand.check_logits()
    hand.check_contents()
    for request_id, expected in asked.items():
        cancelled = hand.last(request_id).finish_reason == "cancelled" and request_id in doomed
        (hand.check_start if cancelled else hand.check)(request_id, expected)


def make(engine_hands: Callable, wanted: Wanted, case: Case, dice: random.Random) -> EngineHand:
    built = ENGINES[str(case["engine"])]
    page_len, chunk_len, most = built["page_len"], built["chunk_len"], built["num_drafts"]
    options: dict = {"max_rows": case["batch"], "max_len": 6 * page_len, "pipeline_depth": case["depth"]}
    options["cuda_graphs"] = case["steps"] == "in buckets"
    kind, _, number = str(case["drafts"]).partition(" ")
    kind = {"off": "plain", "random": "scripted"}.get(kind, kind)
    if kind != "plain":
        options["num_drafts"] = int(number) if number.isdigit() else most
    if kind == "scripted":
        options["proposer"] = proposer(str(case["drafts"]), wanted, str(case["family"]), dice)
    chunks = {"less than a chunk": chunk_len - 2, "a page and one": page_len + 1}
    if case["chunk"] in chunks:
        options["max_step_tokens"] = max(chunks[str(case["chunk"])], int(case["batch"]))
    if case["pages"] == "scarce":
        options["num_pages"] = 9
    caches = {"off": {"prefix_cache": False}, "two snapshots": {"num_snapshots": 2}}
    options |= caches.get(str(case["cache"]), {})
    if case["cache"] == "every page":
        options["snapshot_interval"] = page_len
    return engine_hands(case["family"], kind, built, shuffle=dice, **options)


def proposer(drafts: str, wanted: Wanted, family: str, dice: random.Random) -> Scripted:
    if drafts == "random":
        return Scripted(lambda request, room: dice.choices(range(VOCAB), k=dice.randint(0, room)))

    def answers(ids: list[int], num: int) -> list[int]:
        return wanted(family, ids, num)

    return right_and_wrong(answers, dice.randrange(1000))
