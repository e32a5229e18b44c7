"""Rows M4, M5, M6, M8 and M18 of the matrix: hits, snapshots and preemption; see test_matrix.py."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from kit.engine_hand import CHUNK as U
from kit.engine_hand import NUM_DRAFTS as K
from kit.engine_hand import PAGE as B
from kit.engine_hand import VOCAB, EngineHand, Wanted, windows

from hemiola.runtime.cache.edges import hit_len, reusable_len

RECURRENT = ["nemotron_h_moe", "qwen3_5", "three_convs"]


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

    def ended(self, text: list[int], prompt_len: int, final_len: int) -> None:
        """A request has left its pages; and snapshots where it was asked to begin, where it left the path of
        an earlier one, and at the last page edge that its final tokens passed."""
        prompt, cached_len = text[:prompt_len], self._cached_len(text[:prompt_len])
        last = reusable_len(prompt_len, B)
        edges = {last} if last > self.hit(prompt) else set()
        goes_on = any(
            len(page) > cached_len and page[:cached_len] == tuple(text[:cached_len]) for page in self.pages
        )
        if self.hit(prompt) < cached_len < last and goes_on:
            edges.add(cached_len)
        if final_len // B * B > last:
            edges.add(final_len // B * B)
        self.snapshots |= {tuple(text[:edge]) for edge in edges}
        self.pages |= {tuple(text[:edge]) for edge in range(B, len(text), B)}


@pytest.mark.parametrize(
    ("family", "kind", "num_drafts"),
    [
        ("nemotron_h_moe", "mtp", 3),
        ("nemotron_h_moe", "plain", 0),
        ("qwen3_5", "mtp", 1),
        ("three_convs", "mtp", 3),
        ("attention_only", "mtp", 3),
        ("attention_only", "ngram", 3),
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
        n, rules = 2 * B + r, Rules(needs_snapshots=hand.loop.scheduler.prefix.hybrid)
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
    hand.end()


def ask(
    hand: EngineHand, rules: Rules, prompt: list[int], tenant: str, max_tokens: int, audit: bool = False
) -> None:
    """One request alone, which begins where the rules say."""
    request_id = hand.submit(prompt, max_tokens=max_tokens, cache_salt=tenant)
    while hand.goes_on():
        if audit:
            hand.check_contents()
    expected = rules.hit(prompt)
    assert hand.last(request_id).metrics.cached_tokens == expected, f"prompt of {len(prompt)} in {tenant}"
    assert hand.last(request_id).finish_reason == "length", hand.last(request_id)
    rules.ended(prompt + hand.token_ids(request_id), len(prompt), hand.final_len[request_id])


@pytest.mark.parametrize(("kind", "depth"), [("scripted", 0), ("mtp", 1), ("scripted", 2)])
@pytest.mark.parametrize("family", RECURRENT)
def test_m05_a_page_edge_inside_a_window(
    small_hand: Callable, wanted: Wanted, answers: Callable, family: str, kind: str, depth: int
) -> None:
    """Catches snapshots of edges that a window crosses, taken with a wrong bias or not at all.

    The first window starts j tokens before the edge 2B - 1 and keeps `kept` drafts; then the edge is passed,
    and the text up to it is a prompt.
    """
    cases = list(itertools.product(range(K + 2), range(K + 1)))
    first: dict[int, int] = {}
    proposer = windows(answers(family), lambda request: first.pop(request.id, None))
    hand = small_hand(family, kind, proposer=proposer, pipeline_depth=depth, num_snapshots=300, num_pages=900)
    text = wanted.story(family, 0, 100)
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
    hand.end()


@pytest.mark.parametrize(("family", "kind"), [*((f, "scripted") for f in RECURRENT), ("three_convs", "mtp")])
def test_m05_two_page_edges_inside_a_window(
    small_hand: Callable, wanted: Wanted, answers: Callable, family: str, kind: str
) -> None:
    """K + 1 > B: of the edges that a window passes, the last that is final is kept."""
    counts: dict[int, list[int]] = {}  # by request: of its windows, how many drafts are right
    proposer = windows(
        answers(family), lambda request: counts[request.id].pop(0) if counts[request.id] else None
    )
    hand = small_hand(family, kind, proposer=proposer, num_drafts=19, num_snapshots=300, num_pages=900)
    text = wanted.story(family)
    first = (0, 1, 2, B - 1, B, B + 1, 18, 19) if kind == "scripted" else (2, B, 19)
    cases = [(n, [kept], 23) for n in (B - 3, B - 1, B + 3) for kept in first]
    cases += [(B + 6, [19, 0], 44)]  # the second window is where the first one's snapshot is taken
    for n, kept, num_tokens in cases:
        rules, tenant = Rules(needs_snapshots=True), f"{n} {kept}"
        counts[len(hand.requests) + 1], counts[len(hand.requests) + 2] = kept, []
        ask(hand, rules, text[:n], tenant, num_tokens, audit=kind == "mtp")
        hand.check(len(hand.requests), text[n : n + num_tokens])
        hand.check_contents()
        ask(hand, rules, text[: n + 20], tenant, 1)
        hand.check(len(hand.requests), text[n + 20 : n + 21])
    hand.end()


@pytest.mark.parametrize(("depth", "staggered"), [(0, True), (1, False), (2, True)])
@pytest.mark.parametrize("family", ["nemotron_h_moe", "three_convs", "attention_only"])
def test_m06_siblings_behind_one_system_prompt(
    small_hand: Callable, wanted: Wanted, family: str, depth: int, staggered: bool
) -> None:
    """Catches hits on what the same step computes, and prefixes that silently never hit."""
    hand = small_hand(family, "mtp", pipeline_depth=depth, num_snapshots=300, num_pages=900)
    text, dice = wanted.story(family, 0, 100), random.Random(6)
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
    hand.end()


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
    small_hand: Callable, wanted: Wanted, family: str, kind: str, prefix_cache: bool, depth: int,
    runs: Sequence[int] = (0, 1, 2),
) -> None:  # fmt: skip
    """Pages for 1.3 requests, six of them; every step is followed by a preemption in one of three runs."""
    for run in runs:
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
            if not hand.goes_on():
                break
            if turn % 3 == run and hand.loop.scheduler.running:
                hand.preempt(hand.loop.scheduler.running[-1])
            if turn % 16 == 0:
                hand.check_contents()
            assert turn < 2000
        hand.end()
        for request_id, expected in ids.items():
            hand.check(request_id, expected)
        assert hand.loop.scheduler.num_preemptions > 7


@pytest.mark.parametrize("family", RECURRENT)
def test_m18_a_conversation(small_hand: Callable, wanted: Wanted, family: str) -> None:
    """Six turns, each the whole history and some more; two conversations, whose first turn is the same."""
    hand, dice = small_hand(family, "mtp", pipeline_depth=1), random.Random(18)
    start = dice.choices(range(3, VOCAB), k=2 * B + 5)
    histories = [list(start), list(start)]
    before: list[int] = []
    for _ in range(6):
        ids = []
        for history in histories:
            ids.append(hand.submit(history, max_tokens=9))
            hand.run()
            expected = hand.kept_edge(before[len(ids) - 1]) if before else len(ids[1:]) * 2 * B
            assert hand.last(ids[-1]).metrics.cached_tokens == expected
            history += hand.token_ids(ids[-1]) + dice.choices(range(3, VOCAB), k=dice.randint(1, B + 3))
        before = ids
    hand.end()
    last = hand.requests[-1]
    hand.check(last.id, wanted(family, last.ids[: last.prompt_len].tolist(), 9))
