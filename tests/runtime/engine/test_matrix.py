"""The correctness matrix on real tiny engines.

Four families: Mamba2, gated delta rule, three convs with a decay per channel, attention only as a control.
Every case asks: tokens are the oracle's, or the plain run's argmax, which other cases compare with it;
logits are the plain run's, bit for bit; a request's hit is what `hit_len` makes of the cache's content
(checked by EngineHand at every admission); pages, slots and requests add up after every turn; every cached
page and snapshot is recomputed from its tokens at the end; what is free is NaN; a text gets the same drafts,
whatever was reused. Axis G (graphs) does not exist yet: nothing here runs on a GPU.

    row      here, and where else
    M1       test_m01   tests/builder/test_graph.py (pieces of every size)
    M2       test_m02
    M3       test_reports.py (004)   test_matrix_pairs.py (windows of random lengths beside each other)
    M4-M6 M8 test_matrix_cache.py   ../cache/test_prefix.py, test_prefix_loss.py (the index alone)
    M7       test_m07   ../cache/test_prefix.py
    M9       test_m09   test_drafts.py, test_loop.py (stop strings)
    M10      test_m10; graph sizes: none yet
    M11 M12  test_m11, test_m12   test_drafts.py (M11), test_storms.py (fake session)
    M13 M14  test_m13, test_m14   test_edge_states.py, tests/plugins/test_recurrences.py
    M15      test_engine_storms.py   test_storms.py (fake session)
    M16      test_m16   test_sampling.py (chi-square of the sampler and of acceptance)
    M17      test_m17   test_sampling.py (each processor)
    M18      test_matrix_cache.py; with trained weights: README's benchmark
    M19      tests/plugins/attention
    M20      ../test_config.py, tests/builder/test_build.py
    pairs    test_matrix_pairs.py: all pairs of values of all axes

Nearly all rows, pairs and some storms on engines that were cut, by tokens: test_cut_engines.py.
"""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from kit.engine_hand import CHUNK as U
from kit.engine_hand import NUM_DRAFTS as K
from kit.engine_hand import PAGE as B
from kit.engine_hand import SMALL, VOCAB, Wanted, right_and_wrong, windows
from kit.harness import Harness
from kit.narrow import by_token
from kit.plain import places
from kit.proposers import Scripted, Text

FAMILIES = ["nemotron_h_moe", "qwen3_5", "three_convs", "attention_only"]


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_m01_prompts_of_every_length(small_hand: Callable, wanted: Wanted, family: str, kind: str) -> None:
    """Catches prompts and tails of K + 1 tokens that are taken for windows, and one-token prompts."""
    hand, text = small_hand(family, kind, prefix_cache=False), wanted.story(family)
    lengths = list(range(1, 3 * B + K + 3))
    for length in random.Random(0).sample(lengths, len(lengths)):
        hand.submit(text[:length], max_tokens=5)
    hand.run()
    for request in hand.requests:
        if request.prompt_len >= 3:
            hand.check(request.id, text[request.prompt_len : request.prompt_len + 5])
    hand.check_logits()


@pytest.mark.parametrize("family", FAMILIES)
def test_m02_every_three_accepted_counts_in_a_row(
    small_hand: Callable, wanted: Wanted, answers: Callable, family: str
) -> None:
    """Catches a state of the wrong draft, stale columns, and boundaries crossed at any index of a window."""
    counts = iter(de_bruijn(K + 1, 3))
    proposer = windows(answers(family), lambda request: next(counts, 0))
    hand, text = small_hand(family, "scripted", proposer=proposer, pipeline_depth=0), wanted.story(family)
    hand.submit(text[:3], max_tokens=180)
    for turn in itertools.count():
        if not hand.goes_on():
            break
        if turn % 3 == 0:
            hand.check_running()
    hand.check(1, text[3:183])
    hand.end()


def de_bruijn(num: int, length: int) -> list[int]:
    """The shortest list of 0..num-1 in which every list of that length occurs."""
    made, seen = [0] * length, {(0,) * length}
    while True:
        last = made[1 - length :]
        fresh = [n for n in reversed(range(num)) if (*last, n) not in seen]
        if not fresh:
            return made
        made.append(fresh[0])
        seen.add(tuple(made[-length:]))


@pytest.mark.parametrize("chunk", [1, K + 1, B - 1, B, B + 1, 3 * B])
@pytest.mark.parametrize(
    ("family", "kind"), [("nemotron_h_moe", "mtp"), ("qwen3_5", "scripted"), ("three_convs", "scripted")]
)
def test_m07_chunks_of_any_size_beside_windows_in_any_order(
    small_hand: Callable, wanted: Wanted, family: str, kind: str, chunk: int
) -> None:
    """Catches row order, chunks that cross a page and chunk tails that look like windows."""
    hand = small_hand(
        family, kind, max_rows=3, max_step_tokens=chunk + 2, shuffle=random.Random(chunk), pipeline_depth=1
    )
    text, other = wanted.story(family, 0, 100), wanted.story(family, 1, 100)
    ids = [hand.submit(other[:n], max_tokens=20) for n in (3, 5)]
    for _ in range(3):
        hand.turn()
    last = hand.submit(text[: 5 * B + 3], max_tokens=4)
    hand.end()
    for request_id, n in zip(ids, (3, 5), strict=True):
        hand.check(request_id, other[n : n + 20])
    hand.check(last, text[5 * B + 3 : 5 * B + 7])


@pytest.mark.parametrize(("family", "depth"), [*zip(FAMILIES, (0, 1, 2, 1), strict=True)])
def test_m09_ends_at_every_index_of_a_window(
    small_hand: Callable, wanted: Wanted, answers: Callable, family: str, depth: int
) -> None:
    """Stop ids, max_tokens and aborts; the next request takes slot and pages over at once."""
    proposer = windows(answers(family), lambda request: K)
    hand = small_hand(
        family, "scripted", proposer=proposer, max_rows=2, max_len=6 * B, num_pages=9, pipeline_depth=depth
    )
    text = wanted.story(family)
    aborts: dict[int, int] = {}  # by request, turns that it may live
    for index, n in itertools.product(range(K + 1), (3, B - 2)):
        stop, expected = text[n + 4 + index], text[n : n + 12]
        stopped = hand.submit(text[:n], max_tokens=12, stop_token_ids=[stop])
        limited = hand.submit(text[:n], max_tokens=5 + index)
        aborts[hand.submit(text[:n], max_tokens=60)] = 1 + index
        cut = expected.index(stop) + 1
        aborts[hand.submit(text[:n], max_tokens=60)] = 2 + index
        while not hand.idle:
            hand.turn()
            for request in list(hand.loop.scheduler.running):
                if request.id in aborts:
                    aborts[request.id] -= 1
                    if aborts[request.id] == 0:
                        hand.loop.abort(request.id)
        assert hand.token_ids(stopped) == expected[:cut] and hand.last(stopped).finish_reason == "stop"
        hand.check(limited, expected[: 5 + index])
    for request_id in aborts:
        assert hand.last(request_id).finish_reason == "cancelled"
        n = hand.requests[request_id - 1].prompt_len
        hand.check_start(request_id, text[n : n + 60])
    hand.end()


@pytest.mark.parametrize("num_drafts", [1, K])
@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5"])
def test_m10_batches_of_every_size(
    small_hand: Callable, wanted: Wanted, family: str, num_drafts: int
) -> None:
    """Big ones, then small ones: catches what padding and rows that have left leave behind."""
    hand, text = small_hand(family, "mtp", num_drafts=num_drafts), wanted.story(family)
    for num in (8, 1, 7, 2, 6, 3, 5, 4):
        for n in range(3, 3 + num):
            hand.submit(text[: n * num_drafts], max_tokens=3 + n % 3)
        hand.run()
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : len(request.ids)])
    hand.end()


@pytest.mark.parametrize("kind", ["ngram", "mtp", "scripted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_m11_up_to_max_len(small_hand: Callable, wanted: Wanted, family: str, kind: str) -> None:
    """Prompts of max_len - 1 .. max_len - K - 2: catches windows and tables that outgrow the request."""
    most = 4 * B
    hand, text = small_hand(family, kind, max_len=most, pipeline_depth=1), wanted.story(family)
    for left in range(1, K + 3):
        hand.submit(text[: most - left], max_tokens=50)
    hand.end()
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : most])


@pytest.mark.parametrize("family", FAMILIES)
def test_m12_drafts_of_every_quality(
    small_hand: Callable, wanted: Wanted, answers: Callable, family: str
) -> None:
    """Always right, always wrong, random, and longer than a page."""
    dice, text = random.Random(12), wanted.story(family, 0, 100)
    qualities = {
        "right": windows(answers(family), lambda request: 99),
        "wrong": windows(answers(family), lambda request: 0),
        "random": Scripted(lambda request, room: dice.choices(range(VOCAB), k=dice.randint(0, room))),
        "mixed": right_and_wrong(answers(family), 12),
    }
    for name, proposer in qualities.items():
        hand = small_hand(family, "scripted", proposer=proposer, num_drafts=19 if name == "mixed" else K)
        ids = {hand.submit(text[:n], max_tokens=30): n for n in (3, B - 1, B, 2 * B + 5)}
        hand.end()
        for request_id, n in ids.items():
            hand.check(request_id, text[n : n + 30])
            metrics = hand.last(request_id).metrics
            if name in ("right", "wrong"):
                assert sum(metrics.accepted) == (sum(metrics.drafted) if name == "right" else 0)


@pytest.mark.parametrize("family", ["nemotron_h_moe", "three_convs", "attention_only"])
def test_m13_pages_of_four_chunks(engine_hands: Callable, wanted: Wanted, family: str) -> None:
    """Catches a state looked up by the page length of attention, or by that of another layer."""
    page = 4 * U
    built = {"page_len": page, "chunk_len": U, "num_drafts": K}
    hand, text = engine_hands(family, "mtp", built, pipeline_depth=0), wanted.story(family)
    for n in (page - 1, page + 1, 2 * page, 3 * page + U + 1, 3 * page + U + 1, 2 * page + 1):
        hand.submit(text[:n], max_tokens=U + 2)
        while hand.goes_on():
            hand.check_running()
        hand.check(len(hand.requests), text[n : n + U + 2])
    assert hand.last(5).metrics.cached_tokens == 3 * page
    hand.end()


@pytest.mark.parametrize("family", FAMILIES)
def test_m14_any_split_gives_one_state(
    tiny_engine: Callable, plain_runs: Callable, wanted: Wanted, family: str
) -> None:
    """One shot == a token at a time == any chunks, bit for bit: logits of every token, all pages, and all
    lines of a slot's states, columns and records."""
    drafts = {"drafts": "ngram"} if family == "attention_only" else {}
    engine_dir = tiny_engine(family, **SMALL, **drafts, max_step_tokens=512)
    text, dice = wanted.story(family, 0, 100)[: 5 * B + 3], random.Random(14)
    expected, harness = plain_runs(engine_dir).after(text), Harness(engine_dir)
    assert expected.logits.argmax(1).tolist()[2:] == wanted.story(family, 0, 100)[3 : len(text) + 1]
    splits = [[1] * (len(text) - 1), [U, B, B - 1, 1, K + 1]]
    splits += [[dice.randint(1, 7) for _ in range(12)] for _ in range(3)]
    ring_slack = U + harness.manifest.limits.num_drafts
    for cuts in splits:
        harness.forget()
        assert torch.equal(harness.run(text, *cuts), expected.logits)
        (request,) = harness.requests
        for state in harness.manifest.states:
            held = harness.states[state.name]
            if state.name.startswith("mtp."):
                continue  # of the head, which did not run
            if state.kind == "page":
                assert torch.equal(
                    by_token(state.name, held[request.pages]).flatten(0, 1)[: len(text)],
                    expected.pages[state.name],
                )
            else:
                lines = places(state, request.edge, len(text), ring_slack)
                lines = slice(None) if lines is None else lines
                assert torch.equal(held[request.slot][lines], expected.slot[state.name][lines]), state.name


SAMPLED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.3,
}
EDITED = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0, 40: -50.0, 92: 2.0}},
    {"bad_words_ids": ((42,), (121, 254), (47,)), "min_tokens": 9, "stop_token_ids": (39, 45)},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_m16_a_seeded_sample_does_not_depend_on_drafts_hits_or_preemption(
    small_hand: Callable, wanted: Wanted, family: str
) -> None:
    """So neither does the distribution, of which test_sampling.py shows that it is the trunk's."""
    text = wanted.story(family)
    asked = [{**SAMPLED, "seed": seed, "logprobs": (None, 2, 0, 5)[seed]} for seed in range(4)]
    check_same_as_plain(small_hand, family, text[: 2 * B + 1], asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_m17_penalties_biases_and_bad_words_see_accepted_drafts(
    small_hand: Callable, wanted: Wanted, family: str
) -> None:
    """Catches a draft's logits that know nothing of the drafts before it."""
    check_same_as_plain(small_hand, family, wanted.story(family)[: 2 * B + 1], EDITED)


def check_same_as_plain(small_hand: Callable, family: str, prompt: list[int], asked: list[dict]) -> None:
    """Twice each, the second time from a hit and with preemptions."""
    expected: list[list[int]] = []
    rooms = itertools.cycle([K, 1, 2])

    def right(request: Text, room: int) -> list[int]:
        done = request.total_len - request.prompt_len
        return expected[(request.id - 1) % len(expected)][done : done + min(room, next(rooms))]

    options = {"scripted": {"proposer": Scripted(right), "pipeline_depth": 1}}
    for kind in ("plain", "mtp", "ngram", "scripted"):
        hand = small_hand(family, kind, **options.get(kind, {}))
        for again in range(2):
            ids = [hand.submit(prompt, max_tokens=24, **params) for params in asked]
            for turn in itertools.count():
                if not hand.goes_on():
                    break
                if again and turn % 5 == 0 and hand.loop.scheduler.running:
                    hand.preempt(hand.loop.scheduler.running[-1])
            got = [hand.token_ids(request_id) for request_id in ids]
            expected = expected or got
            assert got == expected, kind
        if kind == "scripted":
            assert sum(sum(hand.last(n).metrics.accepted) for n in ids) > 20
        hand.end()
    assert len({tuple(ids) for ids in expected}) == len(expected), "too alike to tell anything"
