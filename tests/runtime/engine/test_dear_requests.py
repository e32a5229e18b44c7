"""What the dearest legal request costs in a step: bytes and lines of Python are counted, not seconds."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.counted import lines_of_python
from kit.fake_session import VOCAB, FakeSession, oracle, resolved
from kit.guided import compiled, grammars
from kit.hand import Hand
from torch.utils._python_dispatch import TorchDispatchMode

from hemiola.runtime.api import (
    MAX_CHARACTERS,
    MAX_ENTRIES,
    MAX_WORD_IDS,
    SamplingParams,
    StructuredOutputsParams,
)
from hemiola.runtime.choose.rule import Forbidden, Rule
from hemiola.runtime.choose.rules import groups_of
from hemiola.runtime.choose.sampling import choose
from hemiola.runtime.errors import Refused
from hemiola.runtime.schedule.request import Bounds, Request, new_request
from hemiola.runtime.text import Growing

CPU = torch.device("cpu")
V, W, LINES = 4096, 512, 64  # vocabulary, tokens of a slot, lines of a step
BOUNDS = Bounds(W, W, V, (0,))
WORDS = {  # all as dear as is legal, in other shapes
    "many of one token": [[i] for i in range(1, MAX_ENTRIES + 1)],
    "many of four tokens": [[i, 2, 3, 4] for i in range(1024)],
    "few long ones": [[i] * 1024 for i in range(1, 5)],
    "one of each length": [[7] * i for i in range(1, 90)],
}
DEAR: dict[str, Any] = {
    "max_tokens": W,
    "min_tokens": W,
    "stop_token_ids": list(range(1000, 1000 + MAX_ENTRIES)),
    "logit_bias": dict.fromkeys(range(2000, 2000 + MAX_ENTRIES), -1.0),
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "temperature": 0.5,
    "top_p": 0.5,
    "min_p": 0.1,
}


class Bytes(TorchDispatchMode):
    """Counts those of all results that share no memory with an argument, and so what was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.total += tensor.nbytes
                self.most = max(self.most, tensor.nbytes)
        return result


def a_request(**params: Any) -> Request:
    return new_request(1, [5, 6, 7], SamplingParams(**params), BOUNDS)


def bytes_of_a_step(rules: list[Rule]) -> Bytes:
    scores, ids = torch.zeros(len(rules), V), torch.full((2, W), 7, dtype=torch.int32)
    slot, position = torch.ones(len(rules), dtype=torch.int64), torch.arange(len(rules)) % 300 + 100
    choose(scores, rules, slot, position, ids)
    with Bytes() as counted:
        choose(scores, rules, slot, position, ids)
    return counted


def test_15_kilobytes_of_bad_words_do_not_stall_everybody() -> None:
    """1,024 words of 1,024 ids were a million numbers per line of logits, made in each step."""
    with pytest.raises(Refused) as refused:
        a_request(bad_words_ids=[[1] * 1024] * 1024)
    assert str(refused.value) == (
        f"bad_words_ids has {2**20} token ids in all, at most {MAX_WORD_IDS} are served; give fewer"
    )
    plain = bytes_of_a_step([a_request(presence_penalty=0.1).rule] * 16)
    dear = bytes_of_a_step([a_request(presence_penalty=0.1, bad_words_ids=[[1] * 1024] * 4).rule] * 16)
    assert dear.total - plain.total < 16 * MAX_WORD_IDS * 100


@pytest.mark.parametrize("shape", WORDS)
def test_the_dearest_bad_words_cost_a_line_no_more_than_a_number_of_bytes_for_each_id(shape: str) -> None:
    words = WORDS[shape]
    assert sum(map(len, words)) <= MAX_WORD_IDS
    least = bytes_of_a_step([a_request(**DEAR).rule] * LINES)
    most = bytes_of_a_step([a_request(**DEAR, bad_words_ids=words).rule] * LINES)
    assert most.total - least.total < LINES * MAX_WORD_IDS * 100
    assert most.most <= 2 * least.most, "no table is larger than those of the vocabulary"


def test_the_dearest_request_costs_a_line_what_is_proportional_to_its_vocabulary() -> None:
    most = bytes_of_a_step([a_request(**DEAR, bad_words_ids=WORDS["many of four tokens"]).rule] * LINES)
    assert most.total < LINES * (V * 8 * 40 + W * 8 * 20 + (MAX_WORD_IDS + 2 * MAX_ENTRIES) * 100)


def test_a_dear_request_does_not_widen_the_tables_of_others() -> None:
    cheap, dear = a_request(logit_bias={3: 1.0}).rule, a_request(bad_words_ids=WORDS["few long ones"]).rule
    alone = [cheap] * LINES
    one = bytes_of_a_step([dear]).total
    assert bytes_of_a_step([*alone, dear]).total < bytes_of_a_step(alone).total + 2 * one


@pytest.mark.parametrize("shape", WORDS)
def test_the_dearest_request_holds_half_a_megabyte(shape: str) -> None:
    a_request(**DEAR, bad_words_ids=WORDS[shape])
    tracemalloc.start()
    try:
        held = a_request(**DEAR | {"max_tokens": 2**31 - 1}, bad_words_ids=WORDS[shape])
        assert held.ids.nbytes == 4 * W and tracemalloc.get_traced_memory()[0] < 2**19
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", WORDS)
def test_a_step_walks_through_no_list_in_python(shape: str) -> None:
    dear = [a_request(**DEAR, bad_words_ids=WORDS[shape]).rule for _ in range(4)] * 4
    cheap = [a_request(**DEAR | {"stop_token_ids": [9], "logit_bias": {3: 1.0}}).rule for _ in range(4)] * 4
    count = lines_of_python(lambda: groups_of(dear, CPU))
    assert 0 < count <= lines_of_python(lambda: groups_of(cheap, CPU)) + 100


@pytest.mark.parametrize("shape", WORDS)
def test_a_grammar_looks_up_bad_words_and_does_not_walk_through_them(shape: str) -> None:
    rule = a_request(**DEAR, bad_words_ids=WORDS[shape]).rule
    forbidden, output = Forbidden(rule.lists, rule.bad_words, W), [7] * 300
    num_lens = len(set(map(len, WORDS[shape])))
    assert lines_of_python(lambda: forbidden(output)) < 20 + 10 * num_lens <= 20 + 10 * 90
    wanted = {word[-1] for word in WORDS[shape] if output[len(output) - len(word) + 1 :] == word[:-1]}
    assert {*forbidden(output).tolist()} == wanted | rule.stop_ids
    assert {*forbidden([7] * W).tolist()} == wanted


class Letters:
    """A text of a letter per token."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + token_id) for token_id in ids)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


@pytest.mark.parametrize("num", [1, 64, MAX_ENTRIES])
def test_the_dearest_stop_strings_cost_a_token_so_many_comparisons_as_they_have_characters(num: int) -> None:
    size = MAX_CHARACTERS["stop"] // num
    stop = ["a" * size, *["b" * size] * (num - 1)]
    growing = Growing(Letters(), [], SamplingParams(stop=stop).stop)  # type: ignore[arg-type]
    for _ in range(size - 2):
        growing.push(0)
    counts = []
    for token_id in (0, 1, 0):
        counts.append(lines_of_python(lambda token_id=token_id: growing.push(token_id)))
    assert max(counts) < 3 * MAX_CHARACTERS["stop"] + 10 * num + 100


@pytest.mark.parametrize("depth", [0, 2])
def test_log_probabilities_that_have_left_are_held_until_the_end(
    make_hand: Callable[..., Hand], depth: int
) -> None:
    """3 KB for each token of 64 long answers, whose callers read them as they come."""
    hand = make_hand(session=FakeSession(resolved(pipeline_depth=depth)))
    request_id = hand.submit([1, 2], max_tokens=30, logprobs=2, output_ids=oracle([1, 2], 3))
    while not hand.ended(request_id):
        hand.turn()
        assert len(hand.requests[0].logprobs) <= 1
    told = [score.token_id for piece in hand.pieces[request_id] for score in piece.logprobs or ()]
    assert told == hand.token_ids(request_id) == oracle([1, 2], 30)[3:]


def test_a_grammar_that_is_too_large_is_not_kept() -> None:
    made = grammars()
    huge = StructuredOutputsParams(choice=("a" * 2**18, "b"))
    with pytest.raises(Refused, match="are too many, the limit is 262144"):
        made.compile(huge)
    assert huge not in made._kept


def test_a_mask_costs_the_same_whatever_ends_and_bad_words_there_are() -> None:
    def masks(**params: Any) -> int:
        bounds = Bounds(64, 64, VOCAB, (VOCAB - 1,))
        asked = SamplingParams(max_tokens=20, **params)
        request = new_request(1, [1, 2], asked, bounds, grammar=compiled("[a-f]{2,}x?"))
        assert request.guide is not None
        guide, text = request.guide, request.ids[:2]
        return lines_of_python(lambda: guide.follow(text))

    least = masks()
    ends = [*range(60, VOCAB - 1)]
    assert masks(stop_token_ids=ends, bad_words_ids=[[i, 40] for i in range(60)], min_tokens=2) < least + 60
