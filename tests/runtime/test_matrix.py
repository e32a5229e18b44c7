"""The correctness matrix (reference/peers_vllm_sglang.md, section 7) on real tiny engines.

Four families: Mamba2, gated delta rule, three convs with a decay per channel, attention only as a control.
Every case asks: tokens are the oracle's, or the plain run's argmax, which other cases compare with it;
logits are the plain run's, bit for bit; a request's hit is what `hit_len` makes of the cache's content
(checked by EngineHand at every admission); pages, slots and requests add up after every turn; every cached
page and snapshot is recomputed from its tokens at the end; what is free is NaN; a text gets the same drafts,
whatever was reused. Axis G (graphs) does not exist yet: nothing here runs on a GPU.

    row      here, and where else
    M1       test_m01   builder/test_graph.py (pieces of every size), test_engines.py (lengths around edges)
    M2 M3    test_m02, test_m03   test_drafts.py (fake session: every sequence of accepted counts)
    M4-M8    test_m04 .. test_m08   cache/test_prefix.py (the index alone)
    M9       test_m09   test_drafts.py, test_llm.py (stop strings)
    M10      test_m10; graph sizes: none yet
    M11 M12  test_m11, test_m12   test_drafts.py
    M13 M14  test_m13, test_m14   test_edge_states.py, plugins/test_recurrences.py
    M15      test_engine_storms.py   test_storms.py (fake session)
    M16      test_m16   test_sampling.py (chi-square of the sampler and of acceptance)
    M17      test_m17   test_sampling.py (each processor)
    M18      test_m18; with trained weights: README's benchmark
    M19      plugins/attention
    M20      test_config.py, builder/test_build.py
    pairs    test_matrix_pairs.py: all pairs of values of all axes
"""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from engine_hand import VOCAB, EngineHand, Wanted, right_and_wrong, windows
from harness import Harness
from proposers import Scripted, Text

from hemiola.runtime.cache.prefix import hit_len, reusable_len

FAMILIES = ["nemotron_h_moe", "qwen3_5", "three_convs", "attention_only"]
RECURRENT = FAMILIES[:3]
B, U, K = 16, 8, 3  # page, chunk, drafts
SMALL = {"page_len": B, "chunk_len": U, "num_drafts": 19, "numerics": "exact"}  # a window crosses two pages


@pytest.fixture
def small_hand(engine_hands: Callable[..., EngineHand]) -> Callable[..., EngineHand]:
    """(family, kind, options) -> a hand over the engine of these sizes, with K drafts."""

    def make(family: str, kind: str = "plain", **options: object) -> EngineHand:
        if kind != "plain":
            options.setdefault("num_drafts", K)
        return engine_hands(family, kind, SMALL, **options)

    return make


@pytest.fixture
def answers(wanted: Wanted) -> Callable[[str], Callable[[Sequence[int], int], list[int]]]:
    return lambda family: lambda ids, num: wanted(family, ids, num)


def end(hand: EngineHand) -> None:
    hand.run()
    hand.check_logits()
    hand.check_contents()


class Rules:
    """What a cache must hold, if requests come one after the other and nothing is ever evicted."""

    def __init__(self, needs_snapshots: bool) -> None:
        self.needs_snapshots = needs_snapshots
        self.pages: set[tuple[int, ...]] = set()
        self.snapshots: set[tuple[int, ...]] = set()

    def hit(self, prompt: list[int]) -> int:
        edges = [edge for edge in range(B, len(prompt), B) if tuple(prompt[:edge]) in self.snapshots]
        return hit_len(len(prompt), B, self._cached_len(prompt), edges if self.needs_snapshots else None)

    def _cached_len(self, prompt: list[int]) -> int:
        edges = range(B, len(prompt), B)
        return max((edge for edge in edges if tuple(prompt[:edge]) in self.pages), default=0)

    def ended(self, text: list[int], prompt_len: int, certain_len: int) -> None:
        """A request has left its pages; and snapshots where it was asked to begin, where it left the path of
        an earlier one, and at the last page edge that its certain tokens passed."""
        prompt, cached_len = text[:prompt_len], self._cached_len(text[:prompt_len])
        last = reusable_len(prompt_len, B)
        edges = {last} if last > self.hit(prompt) else set()
        goes_on = any(
            len(page) > cached_len and page[:cached_len] == tuple(text[:cached_len]) for page in self.pages
        )
        if self.hit(prompt) < cached_len < last and goes_on:
            edges.add(cached_len)
        if certain_len // B * B > last:
            edges.add(certain_len // B * B)
        self.snapshots |= {tuple(text[:edge]) for edge in edges}
        self.pages |= {tuple(text[:edge]) for edge in range(B, len(text), B)}


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
    hand, text = small_hand(family, "scripted", proposer=proposer), wanted.story(family)
    hand.submit(text[:3], max_tokens=180)
    for turn in itertools.count():
        if not next_is_busy(hand):
            break
        if turn % 3 == 0:
            hand.check_running()
    hand.check(1, text[3:183])
    end(hand)


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


def next_is_busy(hand: EngineHand) -> bool:
    hand.turn()
    return not hand.idle


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_m03_windows_of_all_lengths_beside_each_other(
    small_hand: Callable, wanted: Wanted, answers: Callable, family: str, depth: int
) -> None:
    """Report 004: a step without drafts, or with fewer, after a step with accepted ones."""
    lengths = {1: itertools.cycle([3, 0, 0, 2, 1, 0, 3]), 2: itertools.cycle([0, 3, 3, 0])}
    right = windows(answers(family), lambda request: K).script
    proposer = Scripted(lambda request, room: right(request, room)[: next(lengths[request.id])])
    hand = small_hand(family, "scripted", proposer=proposer, pipeline_depth=depth)
    text = wanted.story(family)
    ids = {hand.submit(text[:n], max_tokens=40): n for n in (3, 13)}
    end(hand)
    for request_id, n in ids.items():
        hand.check(request_id, text[n : n + 40])
        assert sum(hand.last(request_id).metrics.accepted) > 5


@pytest.mark.parametrize(
    ("family", "kind", "num_drafts"),
    [
        ("nemotron_h_moe", "mtp", 3),
        ("nemotron_h_moe", "plain", 0),
        ("qwen3_5", "mtp", 1),
        ("three_convs", "mtp", 3),
        ("attention_only", "mtp", 3),
    ],
)
def test_m04_a_prompt_again_and_longer_and_with_another_token_anywhere(
    small_hand: Callable, wanted: Wanted, family: str, kind: str, num_drafts: int
) -> None:
    """Catches hits that are too long or too short, tails of one token, and two owners of one page."""
    options = {"num_drafts": num_drafts} if num_drafts else {}
    hand = small_hand(family, kind, num_snapshots=300, num_pages=900, **options)
    text, dice = wanted.story(family), random.Random(4)
    for r in range(-2, K + 3):
        n, rules = 2 * B + r, Rules(needs_snapshots=True)
        prompt = text[:n]
        ask(hand, rules, prompt, str(r), 8)
        hand.check(len(hand.requests), text[n : n + 8])
        ask(hand, rules, prompt, str(r), 2)
        ask(hand, rules, text[: n + 1], str(r), 2)
        ask(hand, rules, [*prompt, dice.randrange(3, VOCAB)], str(r), 2)
        for p in range(n) if r == 1 else (0, B - 1, B, n - 1):
            other = (prompt[p] + dice.randrange(1, 300)) % VOCAB
            ask(hand, rules, [*prompt[:p], other, *prompt[p + 1 :]], str(r), 1)
    assert hand.loop.scheduler.prefix.statistics.hit_tokens > 1000
    end(hand)


def ask(hand: EngineHand, rules: Rules, prompt: list[int], tenant: str, max_tokens: int) -> None:
    """One request alone, which begins where the rules say."""
    request_id = hand.submit(prompt, max_tokens=max_tokens, cache_salt=tenant)
    hand.run()
    expected = rules.hit(prompt)
    assert hand.last(request_id).metrics.cached_tokens == expected, f"prompt of {len(prompt)} in {tenant}"
    rules.ended(prompt + hand.token_ids(request_id), len(prompt), hand.certain_len[request_id])


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("family", RECURRENT)
def test_m05_a_page_edge_inside_a_window(
    small_hand: Callable, wanted: Wanted, answers: Callable, family: str, depth: int
) -> None:
    """Catches snapshots of edges that a window crosses, taken with a wrong bias or not at all.

    The first window starts j tokens before the edge 2B - 1 and keeps `kept` drafts; then the edge is passed,
    and the text up to it is a prompt.
    """
    cases = list(itertools.product(range(K + 2), range(K + 1)))
    first: dict[int, int] = {}
    proposer = windows(answers(family), lambda request: first.pop(request.id, None))
    hand = small_hand(
        family, "scripted", proposer=proposer, pipeline_depth=depth, num_snapshots=300, num_pages=900
    )
    text = wanted.story(family)
    for j, kept in cases:
        n = 2 * B - 1 - j
        request_id = hand.submit(text[:n], max_tokens=2 * B + 4 - n, cache_salt=f"{j} {kept}")
        first[request_id] = kept
    hand.run()
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : 2 * B + 4])
        assert sum(hand.last(request.id).metrics.accepted) == cases[request.id - 1][1]
    for j, kept in cases:
        for cut, expected in ((2 * B, B), (2 * B + 1, 2 * B), (2 * B + 3, 2 * B)):
            request_id = hand.submit(text[:cut], max_tokens=2, cache_salt=f"{j} {kept}")
            hand.run()
            hand.check(request_id, text[cut : cut + 2])
            assert hand.last(request_id).metrics.cached_tokens == expected, (j, kept, cut)
    end(hand)


@pytest.mark.parametrize("family", RECURRENT)
def test_m05_two_page_edges_inside_a_window(
    small_hand: Callable, wanted: Wanted, answers: Callable, family: str
) -> None:
    """K + 1 > B: of the edges that a window passes, the last that is certain is kept."""
    first: dict[int, int] = {}
    proposer = windows(answers(family), lambda request: first.pop(request.id, None))
    hand = small_hand(family, "scripted", proposer=proposer, num_drafts=19, num_snapshots=300, num_pages=900)
    text = wanted.story(family)
    for n, kept in itertools.product((B - 3, B - 1, B + 3), (0, 1, 2, B - 1, B, B + 1, 18, 19)):
        rules, tenant = Rules(needs_snapshots=True), f"{n} {kept}"
        first[len(hand.requests) + 1] = kept
        ask(hand, rules, text[:n], tenant, 23)
        hand.check(len(hand.requests), text[n : n + 23])
        ask(hand, rules, text[: n + 20], tenant, 1)
        hand.check(len(hand.requests), text[n + 20 : n + 21])
    end(hand)


@pytest.mark.parametrize(("depth", "staggered"), [(0, True), (1, False), (2, True)])
@pytest.mark.parametrize("family", ["nemotron_h_moe", "three_convs", "attention_only"])
def test_m06_siblings_behind_one_system_prompt(
    small_hand: Callable, wanted: Wanted, family: str, depth: int, staggered: bool
) -> None:
    """Catches hits on what the same step computes, and prefixes that silently never hit."""
    hand = small_hand(family, "mtp", pipeline_depth=depth, num_snapshots=300, num_pages=900)
    text, dice = wanted.story(family), random.Random(6)
    prompts = [
        (text[:s] + dice.choices(range(3, VOCAB), k=dice.choice([1, 5, B])), str(s))
        for s in (U, B - 1, B, B + 1, 2 * B + 3)
        for _ in range(8)
    ]
    for prompt, tenant in prompts:
        hand.submit(prompt, max_tokens=5, cache_salt=tenant)
        for _ in range(dice.choice([0, 1, 4]) if staggered else 0):
            hand.turn()
    hand.run()
    hand.check_contents()
    for prompt, tenant in prompts:
        request_id = hand.submit(prompt, max_tokens=2, cache_salt=tenant)
        hand.run()
        assert hand.last(request_id).metrics.cached_tokens == reusable_len(len(prompt), B)
    end(hand)


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
    text, other = wanted.story(family), wanted.story(family, 1, 100)
    ids = [hand.submit(other[:n], max_tokens=20) for n in (3, 5)]
    for _ in range(3):
        hand.turn()
    last = hand.submit(text[: 5 * B + 3], max_tokens=4)
    end(hand)
    for request_id, n in zip(ids, (3, 5), strict=True):
        hand.check(request_id, other[n : n + 20])
    hand.check(last, text[5 * B + 3 : 5 * B + 7])


@pytest.mark.parametrize(
    ("family", "kind", "prefix_cache", "depth"),
    [
        ("nemotron_h_moe", "mtp", True, 0),
        ("nemotron_h_moe", "scripted", True, 2),
        ("qwen3_5", "mtp", True, 1),
        ("qwen3_5", "scripted", False, 0),
        ("three_convs", "scripted", True, 1),
        ("attention_only", "ngram", True, 2),
    ],
)
def test_m08_preemption_at_every_step(
    small_hand: Callable, wanted: Wanted, family: str, kind: str, prefix_cache: bool, depth: int
) -> None:
    """Pages for 1.3 requests, six of them; every step is followed by a preemption in one of three runs."""
    for run in range(3):
        hand = small_hand(
            family,
            kind,
            max_len=6 * B,
            num_pages=9,
            max_rows=4,
            prefix_cache=prefix_cache,
            pipeline_depth=depth,
        )
        ids = {}
        for number, n in enumerate((3, 9, B, B + 1, 2 * B - 1, 40)):
            text = wanted.story(family, number % 3, 100)
            ids[hand.submit(text[:n], max_tokens=17)] = text[n : n + 17]
        for turn in itertools.count():
            if not next_is_busy(hand):
                break
            if turn % 3 == run and hand.loop.scheduler.running:
                hand.preempt(hand.loop.scheduler.running[-1])
            if turn % 16 == 0:
                hand.check_contents()
            assert turn < 2000
        end(hand)
        for request_id, expected in ids.items():
            hand.check(request_id, expected)
        assert hand.loop.scheduler.num_preemptions > 7


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
    end(hand)


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
    end(hand)


@pytest.mark.parametrize("kind", ["ngram", "mtp", "scripted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_m11_up_to_max_len(small_hand: Callable, wanted: Wanted, family: str, kind: str) -> None:
    """Prompts of max_len - 1 .. max_len - K - 2: catches windows and tables that outgrow the request."""
    most = 4 * B
    hand, text = small_hand(family, kind, max_len=most, pipeline_depth=1), wanted.story(family)
    for left in range(1, K + 3):
        hand.submit(text[: most - left], max_tokens=50)
    end(hand)
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : most])


@pytest.mark.parametrize("family", FAMILIES)
def test_m12_drafts_of_every_quality(
    small_hand: Callable, wanted: Wanted, answers: Callable, family: str
) -> None:
    """Always right, always wrong, random, and longer than a page."""
    dice, text = random.Random(12), wanted.story(family)
    qualities = {
        "right": windows(answers(family), lambda request: 99),
        "wrong": windows(answers(family), lambda request: 0),
        "random": Scripted(lambda request, room: dice.choices(range(VOCAB), k=dice.randint(0, room))),
        "mixed": right_and_wrong(answers(family), 12),
    }
    for name, proposer in qualities.items():
        hand = small_hand(family, "scripted", proposer=proposer, num_drafts=19 if name == "mixed" else K)
        ids = {hand.submit(text[:n], max_tokens=30): n for n in (3, B - 1, B, 2 * B + 5)}
        end(hand)
        for request_id, n in ids.items():
            hand.check(request_id, text[n : n + 30])
            metrics = hand.last(request_id).metrics
            if name in ("right", "wrong"):
                assert sum(metrics.accepted) == (sum(metrics.drafted) if name == "right" else 0)


@pytest.mark.parametrize("family", ["nemotron_h_moe", "three_convs", "attention_only"])
def test_m13_pages_of_four_chunks(engine_hands: Callable, wanted: Wanted, family: str) -> None:
    """Catches a state looked up by the page length of attention, or by that of another layer."""
    page = 4 * U
    built = {"page_len": page, "chunk_len": U, "num_drafts": K, "numerics": "exact"}
    hand, text = engine_hands(family, "mtp", built), wanted.story(family)
    for n in (page - 1, page + 1, 2 * page, 3 * page + U + 1, 3 * page + U + 1, 2 * page + 1):
        hand.submit(text[:n], max_tokens=U + 2)
        while next_is_busy(hand):
            hand.check_running()
        hand.check(len(hand.requests), text[n : n + U + 2])
    assert hand.last(5).metrics.cached_tokens == 3 * page
    end(hand)


@pytest.mark.parametrize("family", FAMILIES)
def test_m14_any_split_gives_one_state(tiny_engine: Callable, wanted: Wanted, family: str) -> None:
    """One shot == a token at a time == any chunks, bit for bit: logits of every token, and all states."""
    engine_dir = tiny_engine(family, **SMALL, max_step_tokens=512)
    text, dice = wanted.story(family)[: 5 * B + 3], random.Random(14)
    splits = [[], [1] * (len(text) - 1), [U, B, B - 1, 1, K + 1]]
    splits += [[dice.randint(1, 7) for _ in range(12)] for _ in range(3)]
    found = []
    for cuts in splits:
        harness = Harness(engine_dir)
        logits = harness.run(text, *cuts)
        slot = {
            s.name: harness.states[s.name][1] for s in harness.manifest.states if s.name.endswith(".state")
        }
        found.append((logits, slot))
    for logits, slot in found[1:]:
        assert logits.equal(found[0][0])
        assert all(slot[name].equal(state) for name, state in found[0][1].items())
    assert (found[0][0].argmax(1).tolist())[2:] == wanted.story(family)[3 : len(text) + 1]


SAMPLED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.3,
}
ADORNED = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0, 40: -50.0, 92: 2.0}},
    {"bad_words_ids": ((42,), (121, 254), (47,)), "min_tokens": 9, "stop_token_ids": (39, 45)},
]


@pytest.mark.parametrize("family", ["attention_only", "qwen3_5"])
def test_m16_a_seeded_sample_does_not_depend_on_drafts_hits_or_preemption(
    small_hand: Callable, wanted: Wanted, family: str
) -> None:
    """So neither does the distribution, of which test_sampling.py shows that it is the trunk's."""
    text = wanted.story(family)
    asked = [{**SAMPLED, "seed": seed} for seed in range(4)]
    check_same_as_plain(small_hand, family, text[: 2 * B + 1], asked)


@pytest.mark.parametrize("family", ["attention_only", "qwen3_5"])
def test_m17_penalties_biases_and_bad_words_see_accepted_drafts(
    small_hand: Callable, wanted: Wanted, family: str
) -> None:
    """Catches a draft's logits that know nothing of the drafts before it."""
    check_same_as_plain(small_hand, family, wanted.story(family)[: 2 * B + 1], ADORNED)


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
                if not next_is_busy(hand):
                    break
                if again and turn % 5 == 0 and hand.loop.scheduler.running:
                    hand.preempt(hand.loop.scheduler.running[-1])
            got = [hand.token_ids(request_id) for request_id in ids]
            expected = expected or got
            assert got == expected, kind
        if kind == "scripted":
            assert sum(sum(hand.last(n).metrics.accepted) for n in ids) > 20
        end(hand)
    assert len({tuple(ids) for ids in expected}) == len(expected), "too alike to tell anything"


@pytest.mark.parametrize("family", RECURRENT)
def test_m18_a_conversation(small_hand: Callable, wanted: Wanted, family: str) -> None:
    """Six turns, each the whole history and some more; two conversations, whose first turn is the same."""
    hand, dice = small_hand(family, "mtp", pipeline_depth=1), random.Random(18)
    start = dice.choices(range(3, VOCAB), k=2 * B + 5)
    histories = [list(start), list(start)]
    for turn in range(6):
        ids = []
        for history in histories:
            ids.append(hand.submit(history, max_tokens=9))
            hand.run()
            cached = hand.last(ids[-1]).metrics.cached_tokens
            assert turn == 0 or cached >= len(history) // B * B - 2 * B, (
                f"turn {turn}: {cached} of {len(history)}"
            )
            history += hand.token_ids(ids[-1]) + dice.choices(range(3, VOCAB), k=dice.randint(1, B + 3))
    end(hand)
    last = hand.requests[-1]
    hand.check(last.id, wanted(family, last.ids[: last.prompt_len].tolist(), 9))
