"""The five reports against vLLM that the project comes from, each as the behaviour that was wrong.

Every test has been seen red with the mistake of its docstring put back. What
graphs broke (widths of fixed buffers, rows taken for another kind of row) is tested on the batches that they
read; tests/gpu/test_graphs.py has the reports with graphs on a GPU.
"""

import itertools
import random
import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from kit.engine_hand import EngineHand, Wanted
from kit.fake_session import FakeSession, oracle, resolved
from kit.hand import Hand
from kit.proposers import Scripted, Text, always_right

from hemiola.plugins import OPS
from hemiola.runtime.step.program import Batch

FAMILIES = ["nemotron_h_moe", "qwen3_5"]  # Mamba2 + attention + experts; gated delta rule + attention
DEPTHS = [0, 1, 2]
KINDS = ["mtp", "ngram", "scripted"]
PAGE, CHUNK = 16, 16
BUILT = {"page_len": PAGE, "chunk_len": CHUNK}


# 000 (vllm 39809): prefix caching + MTP crashed when many rows ran.


@pytest.mark.parametrize("max_rows", [512, 1024])
def test_000_drafts_of_many_rows_outgrow_a_buffer(make_hand: Callable[..., Hand], max_rows: int) -> None:
    """FakeSession compares every batch with the ABI's widths. Put back: the width of the logits without the
    columns of drafts; `Batch.rows` cut at 256."""
    num_drafts, max_len = 3, 64
    session = FakeSession(
        resolved(
            max_rows=max_rows,
            max_len=max_len,
            max_step_tokens=max_rows * (1 + num_drafts),
            num_drafts=num_drafts,
            prefix_cache=True,
            num_slots=2 * max_rows + 1,
        )
    )
    most_logits = most_rows = 0

    def measure(batch: Batch) -> None:
        nonlocal most_logits, most_rows
        most_logits, most_rows = max(most_logits, len(batch.logits_ids)), max(most_rows, len(batch.rows))

    session.before_run = measure
    hand = make_hand(session=session, proposer=always_right(session.next_token))
    dice = random.Random(max_rows)
    texts = [dice.choices(range(97), k=max_len) for _ in range(8)]
    asked: dict[int, tuple[list[int], int]] = {}

    def ask(prompt: list[int], num_tokens: int, **params: object) -> None:
        asked[hand.submit(prompt, max_tokens=num_tokens, **params)] = (
            prompt,
            min(num_tokens, max_len - len(prompt)),
        )

    for n in range(max_rows):  # all at once: every row decodes, with all its drafts
        ask([*texts[n % 8][: n % 7 + 1], n % 97], 40)
    for _ in range(2):  # every length, the second time behind hits; half of them without drafts
        for length in range(1, max_len):
            ask(texts[length % 8][:length], 7, num_drafts=None if length % 2 else 0)
        hand.run()
    assert most_logits == max_rows * (1 + num_drafts) and most_rows >= max_rows
    hits = [hand.last(request_id).metrics.cached_tokens for request_id in list(asked)[-max_len + 1 :]]
    assert max(hits) == max_len - 8 and sum(hit > 0 for hit in hits) > max_len // 2
    for request_id, (prompt, num_tokens) in asked.items():
        assert hand.token_ids(request_id) == oracle(prompt, num_tokens), f"prompt of {len(prompt)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_000_prefix_hits_of_512_rows_with_mtp_read_foreign_memory(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str
) -> None:
    """On real ops and poisoned memory, for which an illegal address of the report stands. Put back: the
    recurrences take a row's slot modulo 256."""
    story = wanted.story(family)
    built = BUILT | {"num_drafts": 3, "max_rows": 512, "max_step_tokens": 2048}
    hand = engine_hands(family, "mtp", built, max_len=128, num_snapshots=64)
    lengths = [n % 110 + 3 for n in range(512)]
    for _ in range(2):
        ids = {hand.submit(story[:n], max_tokens=5): n for n in lengths}
        hand.loop.turn()
        hand.loop.turn()
        while not hand.idle:
            hand.loop.turn()  # an audit of so many pages after every turn would take a minute
        hand.audit()
        for request_id, length in ids.items():
            hand.check(request_id, story[length : length + 5])
    assert hand.last(max(ids)).metrics.cached_tokens > 0


def test_000_a_head_that_reads_what_it_was_spared_outgrows_a_buffer(
    engine_hands: Callable[..., EngineHand], wanted: Wanted
) -> None:
    """Rows that do not draft owe the head their pairs, and all come to a chunk's edge in one step, beside
    prompts. Put back: the width of a step's tokens for the head as well."""
    built = BUILT | {"num_drafts": 3, "max_rows": 4, "max_step_tokens": 16}
    hand, story = engine_hands("qwen3_5", "mtp", built), wanted.story("qwen3_5")
    for n in (3, 3, 3, 3):
        hand.submit(story[:n], max_tokens=40, num_drafts=0)
    for n in (50, 40, 33):
        hand.submit(story[:n], max_tokens=9)
    hand.end()
    for request in hand.requests:
        hand.check(request.id, story[request.prompt_len : len(request.ids)])


# 001 (vllm 40880): degenerate text, lost tool calls, and a needle cut to its first token.

LETTERS = [chr(32 + n) for n in range(95)] + ["\n", "\0"]
END = 96
CALL = '<tool_call>{{"name": "find", "arguments": {{"what": "{}"}}}}</tool_call>'


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def recall(context: Sequence[int]) -> int:
    """A model that has read its context: it calls a tool with the needle, letter by letter."""
    text = "".join(LETTERS[token] for token in context)
    needle = re.search(r"The needle is (.*?)\.", text)
    said = text.rpartition("A: ")[2]
    answer = CALL.format(needle[1] if needle else "lost") + LETTERS[END]
    return encode(answer[len(said)])[0] if answer.startswith(said) and said != answer else END


@pytest.mark.parametrize("pipeline_depth", DEPTHS)
def test_001_a_needle_of_several_tokens_is_cut(make_hand: Callable[..., Hand], pipeline_depth: int) -> None:
    """Three turns of three conversations at once, prompt lookup and the prefix cache on. Put back: the token
    behind a fully accepted window does not reach the reader; the ledger's `committed_len` counts every
    draft as accepted."""
    sizes = {"max_len": 768, "page_len": 16, "max_step_tokens": 128, "num_drafts": 5, "drafts": "ngram"}
    session = FakeSession(
        resolved(prefix_cache=True, num_slots=17, pipeline_depth=pipeline_depth, **sizes), recall
    )
    hand = make_hand(session=session)
    needles = ["silver platypus 22", "silver platypus 23", "a, b {c: [1, 2]} ..d"[:16]]
    texts = [f"You are terse. {'Hay. ' * n}The needle is {needle}." for n, needle in enumerate(needles)]
    accepted = 0
    for turn in range(3):
        texts = [f"{text}\nQ: where is it?\nA: " for text in texts]
        asked = [hand.submit(encode(text), max_tokens=100, stop_token_ids=[END]) for text in texts]
        hand.run()
        for at, request_id in enumerate(asked):
            answer = "".join(LETTERS[token] for token in hand.token_ids(request_id))
            assert answer == CALL.format(needles[at]) + LETTERS[END]
            metrics = hand.last(request_id).metrics
            assert (metrics.cached_tokens > 0) == (turn > 0)
            accepted += sum(metrics.accepted)
            texts[at] += answer[:-1]
    assert accepted > 100, "prompt lookup should have found the earlier calls"


@pytest.mark.parametrize(
    ("family", "kind", "pipeline_depth"),
    [(FAMILIES[(n + depth) % 2], kind, depth) for n, kind in enumerate(KINDS) for depth in DEPTHS],
)
def test_001_text_degenerates_with_speculation_and_prefix_hits(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str, kind: str, pipeline_depth: int
) -> None:
    """Turns of several lengths of one text, each behind the last one's hit. Put back: a row of 2 to K + 1
    tokens is taken for a prompt's first chunk and sees its own keys only."""
    hand = engine_hands(family, kind, BUILT | {"num_drafts": 3}, pipeline_depth=pipeline_depth)
    stories = [wanted.story(family, number) for number in (0, 2)]  # in 1, two experts tie to the last bit
    for start, end in ((20, 55), (57, 90), (101, 140)):
        asked = [hand.submit(story[:start], max_tokens=end - start) for story in stories]
        hand.run()
        for request_id, story in zip(asked, stories, strict=True):
            hand.check(request_id, story[start:end])
            assert (hand.last(request_id).metrics.cached_tokens > 0) == (start > 20)
    hand.check_contents()


# 002 (vllm 37754): attention read illegal memory with two draft tokens and more.


def ragged_step(ratio: int, num_tokens: int, page_len: int) -> tuple[list, list[torch.Tensor]]:
    """Rows of 0 to 300 tokens before num_tokens new ones; the op's arguments, and what SDPA makes of each.

    Pages lie in any order; whatever no row may read is NaN, and the table's stale ends name pages of others.
    """
    generator = torch.Generator().manual_seed(100 * ratio + num_tokens)
    print("seed", 100 * ratio + num_tokens)
    groups, dim = (2, 16) if ratio < 32 else (1, 16)
    earlier = [0, 1, page_len - 1, page_len, 300, page_len - num_tokens // 2 - 1, 3]
    widths = [-(-(length + num_tokens) // page_len) for length in earlier]
    free = (torch.randperm(sum(widths) + 2, generator=generator) + 1).tolist()
    table = torch.tensor(free[:2]).repeat(len(earlier), max(widths))[:, : max(widths) + 1].to(torch.int32)
    pages = torch.full((2, len(free) + 1, page_len, groups, dim), torch.nan)
    queries, keys, positions, expected = [], [], [], []
    first = 2
    for row, length in enumerate(earlier):
        total = length + num_tokens
        table[row, : widths[row]] = torch.tensor(free[first : first + widths[row]])
        first += widths[row]
        q = torch.randn(num_tokens, groups * ratio, dim, generator=generator)
        kv = torch.randn(2, total, groups, dim, generator=generator)
        for place in range(length):
            pages[:, table[row, place // page_len], place % page_len] = kv[:, place]
        visible = torch.arange(total) <= torch.arange(length, total)[:, None]
        heads = (q.transpose(0, 1)[None], *kv.transpose(1, 2)[:, None])
        o = F.scaled_dot_product_attention(*heads, visible, enable_gqa=True, scale=0.25)
        expected.append(o[0].transpose(0, 1))
        queries.append(q)
        keys.append(kv[:, length:])
        positions.append(torch.arange(length, total, dtype=torch.int32))
    rows = [[n * num_tokens, num_tokens, 0, n + 1, length, 0, 0, 0] for n, length in enumerate(earlier)]
    where = table, torch.tensor(rows, dtype=torch.int32), torch.cat(positions)
    step = [torch.cat(queries), *torch.cat(keys, 1), *pages, *where, 0.25, 0, 1.0, 1.0]
    return step, expected


@pytest.mark.parametrize("ratio", range(1, 33))
def test_002_attention_of_several_queries_reads_foreign_memory(ratio: int) -> None:
    """Query heads per key head 1 to 32, 1 to 8 new tokens, ragged lengths, against SDPA (fp32 sums in other
    orders). Put back: query head h reads key head h modulo G; all tokens of a window see its last key; the
    table is read to its end."""
    for num_tokens, page_len in zip(range(1, 9), itertools.cycle([16, 32, 64, 528])):
        step, expected = ragged_step(ratio, num_tokens, page_len)
        o = OPS["attention"].bind("compiled", ())(*step)
        torch.testing.assert_close(o, torch.cat(expected), rtol=1e-5, atol=2e-6)


# 003 (vllm 42792, 42406): snapshots of edges inside an accepted window were wrong, or were not taken.


def prophet(story: list[int], accepts: Sequence[int]) -> Scripted:
    """Windows of which so many drafts are right (at most all), in turn; by a request's beginning."""
    turns: dict[int, itertools.cycle] = {}

    def script(request: Text, room: int) -> list[int]:
        good = next(turns.setdefault(request.id, itertools.cycle(accepts)))
        ids = story[request.total_len : request.total_len + room]
        return [*ids[:good], *((token + 1) % 320 for token in ids[good:])]

    return Scripted(script)


# By drafts and depth, prompts of which not the last edge is kept, but the one before. A step takes one
# snapshot per row: of a prompt's two last edges the first. With steps in flight, a window may not come to the
# edge that was promised, and the next, which passes it, was planned by then. It costs work, and no token.
LATE = {(3, depth): {64} for depth in DEPTHS}
LATE |= {(20, 0): set(), (20, 1): {59, 60, 61, 62}, (20, 2): {59, 60, 61, 62, 63}}


@pytest.mark.parametrize(
    ("family", "pipeline_depth", "num_drafts"),
    [
        (family, depth, (3, CHUNK + 4)[(n + depth) % 2])
        for n, family in enumerate([*FAMILIES, "three_convs"])
        for depth in DEPTHS
    ],
)
def test_003_an_edge_crossed_inside_an_accepted_window_saves_a_wrong_snapshot(
    engine_hands: Callable[..., EngineHand],
    wanted: Wanted,
    family: str,
    pipeline_depth: int,
    num_drafts: int,
) -> None:
    """The first window crosses a page's edge at each index, K beyond a chunk and a page included; every
    snapshot, convs and states apart, is the plain run's bit for bit, and what begins there goes on like the
    oracle. Put back: the state, and for itself the conv's columns, of the step's last edge instead of the
    snapshot's; a window's edges are not asked for (the step's final tokens decide alone); lengths that
    count every draft as accepted."""
    page = 2 * CHUNK  # so that a slot that stands at an edge is not always a snapshot
    story, edge = wanted.story(family), 2 * page
    built = BUILT | {"page_len": page, "num_drafts": num_drafts}
    sizes = {"max_len": 160, "pipeline_depth": pipeline_depth, "num_snapshots": 128, "num_pages": 400}
    accepts = [num_drafts, num_drafts, 0, num_drafts // 2]
    hand = engine_hands(family, "scripted", built, proposer=prophet(story, accepts), **sizes)
    starts = [edge - index for index in range(num_drafts + 2)]
    end = edge + (28 if num_drafts < CHUNK else 60)  # other steps come behind the window
    asked = [hand.submit(story[:n], max_tokens=end - n, cache_salt=str(n)) for n in starts]
    hand.run()
    saved = {}
    for request_id, start in zip(asked, starts, strict=True):
        hand.check(request_id, story[start:end])
        saved[start] = hand.final_len[request_id] // page * page
    hand.check_contents()
    assert min(saved.values()) >= edge
    again = {n: hand.submit(story[: saved[n] + 1 + n % 3], max_tokens=20, cache_salt=str(n)) for n in starts}
    hand.run()
    for start, request_id in again.items():
        first = saved[start] + 1 + start % 3
        hand.check(request_id, story[first : first + 20])
        hit = hand.last(request_id).metrics.cached_tokens
        late = start in LATE[num_drafts, pipeline_depth]
        assert hit == hand.kept_edge(asked[starts.index(start)]) == saved[start] - page * late, start
    hand.check_contents()
    hand.check_logits()


# 004 (vllm 39273, 40738): after a step that accepted drafts, a step without any read a stale state.


@pytest.mark.parametrize(
    ("family", "kind", "pipeline_depth"),
    [
        (FAMILIES[(n + depth) % 2], kind, depth)
        for n, kind in enumerate(["scripted", "ngram"])
        for depth in DEPTHS
    ],
)
def test_004_a_step_without_drafts_reads_the_state_before_the_accepted_ones(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str, kind: str, pipeline_depth: int
) -> None:
    """K = 64; windows of 64, none, one and some drafts side by side, in every order. Put back: a row without
    drafts reads the `committed` and `edge` that it would have if one draft of its last window had stayed."""
    story = wanted.story(family, 0, 400)
    lengths = [[64, 0], [0, 64, 0, 0], [5, 0, 64, 1], [0], [64, 64, 0], [1, 0, 2, 0, 33]]
    turns = {}

    def script(request: Text, room: int) -> list[int]:
        turn = turns.setdefault(request.id, itertools.cycle(lengths[request.id % len(lengths)]))
        return story[request.total_len :][: min(next(turn), room)]

    options = {"proposer": Scripted(script)} if kind == "scripted" else {}
    built = BUILT | {"num_drafts": 64, "max_step_tokens": 1024}
    hand = engine_hands(family, kind, built, pipeline_depth=pipeline_depth, max_rows=6, **options)
    starts = [3, 15, 16, 17, 31, 40, 64, 100]
    asked = [hand.submit(story[:start], max_tokens=200) for start in starts]
    hand.run()
    metrics = [hand.last(request_id).metrics for request_id in asked]
    print("accepted per window", [sum(m.accepted) / max(m.drafted[0], 1) for m in metrics if m.drafted])
    for start, request_id in zip(starts, asked, strict=True):
        hand.check(request_id, story[start : start + 200])
    hand.check_contents()
    assert sum(sum(m.accepted) for m in metrics) > 0
