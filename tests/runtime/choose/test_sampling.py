"""Edits of logits and filters against plain loops; draws against their distributions; lines stay apart."""

from typing import Any

import numpy as np
import pytest
import torch
from kit.plain_sampling import edited
from scipy.stats import chisquare

from hemiola.plugins.step.draw import reference
from hemiola.plugins.step.draw.reference import ALL, philox, uniform, weigh
from hemiola.plugins.step.edit.reference import edit
from hemiola.runtime.api import Logprob, SamplingParams
from hemiola.runtime.choose import sampling
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.choose.rules import RuleTable, draws_of, edits_of, sorts
from hemiola.runtime.choose.sampling import broken, choose, logprobs, to_logprobs

V = 12
WORD = 2**32 - 1
CPU = torch.device("cpu")


def line(size: int = V, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2


def rule(
    *, seed: int = 0, prompt_len: int = 0, stop_ids: tuple[int, ...] = (), words: Any = (), **values: Any
) -> Rule:
    params = SamplingParams(**{"max_tokens": 100, **values})
    return Rule(params, seed, prompt_len, frozenset(stop_ids), words)


def weighed(scores: torch.Tensor, rules: list[Rule]) -> torch.Tensor:
    *own, _seed, _greedy, has_min_p, most = draws_of(rules, CPU)
    return weigh(scores, *own, has_min_p, most)


def edited_by(own: Rule, scores: torch.Tensor, position: int, ids: torch.Tensor) -> torch.Tensor:
    return edit(scores, *edits_of([own], CPU), torch.tensor([0]), torch.tensor([position]), ids)


def drawn_with(seeds: list[int], position: torch.Tensor) -> torch.Tensor:
    return uniform(draws_of([rule(seed=seed, temperature=1.0) for seed in seeds], CPU).seed, position)


def choose_one(scores: torch.Tensor, own: Rule, history: list[int]) -> int:
    return choose_each(scores.unsqueeze(0), [own], [history])[0]


def choose_each(scores: torch.Tensor, rules: list[Rule], histories: list[list[int]]) -> list[int]:
    """Every line in a slot of its own, with poison behind its history."""
    ids = torch.full((len(rules), max(map(len, histories)) + 2), -(2**31), dtype=torch.int32)
    for slot, history in enumerate(histories):
        ids[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
    position = torch.tensor([len(history) for history in histories])
    return choose(scores, rules, torch.arange(len(rules)), position, ids).tolist()


# Edits of logits.


EDITS = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4},
    {"presence_penalty": 1.3},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.6},
    {"frequency_penalty": -0.6, "presence_penalty": 0.25},
    {"logit_bias": {3: 2.5, 0: -100.0, 7: 0.125}},
    {"words": ((4,), (1, 5), (2, 2, 6), (1, 2, 8), (9, 1, 2, 2, 0))},
    {"min_tokens": 4, "stop_ids": (2, 5)},
    {"min_tokens": 5, "stop_ids": (2, 5)},
    {"min_tokens": 90, "stop_ids": (2, 5), "logit_bias": {2: 50.0}},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {1: 1.0, 4: 9.0},
        "words": ((4,), (2, 10)),
        "min_tokens": 6,
        "stop_ids": (11,),
    },
]


@pytest.mark.parametrize("options", EDITS, ids=str)
@pytest.mark.parametrize(
    "history", [[3, 9, 1, 1, 2, 2], [0, 1], [0, 1, 2], [5, 4, 1, 2], [0, 1, 2, 9, 1, 2, 2]], ids=str
)
def test_an_edit_is_its_formula(options: dict, history: list[int]) -> None:
    """A prompt of two tokens: a bad word that it began is none of the output's, as in vLLM."""
    own = rule(prompt_len=2, **options)
    assert own.edits_logits
    ids = torch.tensor([[*history, -7, 2**31 - 1]], dtype=torch.int32)
    found = edited_by(own, line().unsqueeze(0), len(history), ids)
    np.testing.assert_allclose(found[0], edited(line().tolist(), own, history), rtol=1e-6)
    wanted = int(np.argmax(edited(line().tolist(), own, history)))
    assert choose_one(line(), own, history) == wanted


def test_a_sampled_line_is_edited_first() -> None:
    own = [rule(seed=n, temperature=1.0, words=((3,), (4,)), logit_bias={5: -200.0}) for n in range(300)]
    chosen = choose_each(torch.zeros(300, 6), own, [[0]] * 300)
    assert set(chosen) == {0, 1, 2}


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e300},
        {"logit_bias": {3: 1e300, 4: -1e300}},
        {"logit_bias": {3: 1e300}, "words": ((3,),)},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_values_do_not_break_a_line(options: dict, temperature: float) -> None:
    own = rule(temperature=temperature, **options)
    ids = torch.arange(V, dtype=torch.int32).unsqueeze(0)
    scores = torch.cat((line(), torch.zeros(1)))[1:].unsqueeze(0)
    found = edited_by(own, scores, V, ids)
    assert not broken(found).any()
    chosen = choose_one(scores[0], own, list(range(V)))
    assert (chosen == 3) == ("logit_bias" in options and not own.bad_words)


def test_a_line_that_forbids_everything_still_gets_a_token() -> None:
    for temperature in (0.0, 1.0):
        own = rule(temperature=temperature, words=tuple((n,) for n in range(V)))
        assert 0 <= choose_one(line(), own, [0]) < V


# A draft window: lines at following positions of one slot, whose drafts stand in ids.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_window_of_drafts_chooses_as_one_token_at_a_time(seed: int, temperature: float) -> None:
    options: dict[str, Any] = {"prompt_len": 3, "stop_ids": (2,), "min_tokens": 5, "seed": seed}
    options |= {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.9}
    own = rule(temperature=temperature, words=((1, 4), (0,)), logit_bias={5: 1.0}, **options)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(8, 6, generator=generator)
    prompt, text = [1, 5, 1], [1, 5, 1]
    for at in range(8):
        text.append(choose_one(scores[at], own, text))
    ids = torch.full((3, 20), -1, dtype=torch.int32)
    ids[2, : len(text)] = torch.tensor(text, dtype=torch.int32)
    slot, position = torch.full((8,), 2), torch.arange(3, 11)
    assert choose(scores, [own] * 8, slot, position, ids).tolist() == text[3:]
    wrong = 3 + 4  # a draft that the trunk refuses changes what follows it only
    ids[2, wrong] = (ids[2, wrong] + 1) % 6
    found = choose(scores, [own] * 8, slot, position, ids).tolist()
    assert found[:5] == text[3:8]
    assert found[5] == choose_one(scores[5], own, [*text[:wrong], int(ids[2, wrong])])
    assert prompt == text[:3]


# Filters: the distribution as a plain loop makes it.


def filtered(scores: torch.Tensor, params: SamplingParams) -> np.ndarray:
    wide = scores.double().numpy()
    probs = np.exp((wide - wide.max()) / params.temperature)
    probs[probs < params.min_p] = 0
    order = sorted(range(len(probs)), key=lambda token_id: (-probs[token_id], token_id))
    if params.top_k:
        probs[order[params.top_k :]] = 0
    total, ahead = probs.sum(), 0.0
    for token_id in order:
        mine = probs[token_id]
        if params.top_p < 1 and ahead >= params.top_p * total:
            probs[token_id] = 0
        ahead += mine
    return probs / probs.sum()


def distribution(scores: torch.Tensor, **values: Any) -> np.ndarray:
    weights = weighed(scores.unsqueeze(0), [rule(**{"temperature": 1.0, **values})])[0].double().numpy()
    return weights / weights.sum()


FILTERS = [
    {}, {"temperature": 0.7}, {"temperature": 5.0}, {"top_k": 1}, {"top_k": 3}, {"top_k": 11}, {"top_k": 12},
    {"top_k": 99}, {"top_p": 1e-9}, {"top_p": 0.3}, {"top_p": 0.6}, {"top_p": 0.9}, {"top_p": 0.999},
    {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 5, "top_p": 0.8},
    {"min_p": 0.1, "top_p": 0.7, "temperature": 2.0},
    {"min_p": 0.05, "top_k": 4, "top_p": 0.9, "temperature": 1.5},
]  # fmt: skip


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_filter_is_its_definition(options: dict, seed: int) -> None:
    wanted = filtered(line(seed=seed), SamplingParams(**{"temperature": 1.0, **options}))
    found = distribution(line(seed=seed), **options)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert (found > 0).tolist() == (wanted > 0).tolist()


@pytest.mark.parametrize("size", [1500, 5003])
def test_a_few_best_are_looked_at_first_and_decide_where_they_can(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever needs more sorts: flat lines, whose top_p reaches beyond, and a top_k of more."""
    flat, steep = line(size, 1) / 20, line(size, 2) * 3
    options = [
        {"top_p": 0.9}, {"top_p": 0.9, "min_p": 0.01}, {"top_k": 1024, "top_p": 0.99}, {"top_p": 1e-9},
        {"top_k": 9}, {"top_k": 1300, "top_p": 0.9}, {"top_p": 0.9999999},
    ]  # fmt: skip
    lines = [(scores, rule(temperature=1.0, **own)) for own in options for scores in (steep, flat)]
    scores, rules = torch.stack([scores for scores, _ in lines]), [own for _, own in lines]
    found, sort, sorted_lines = [], torch.Tensor.sort, []

    def counted(keys: torch.Tensor, **options: object) -> object:
        sorted_lines.append(len(keys))
        return sort(keys, **options)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    for few in (1024, size):  # size: the sorted vocabulary only
        monkeypatch.setattr(reference, "FEW_BEST", few)
        found.append([weighed(scores[n : n + 1], rules[n : n + 1])[0] for n in range(len(rules))])
        found.append([*weighed(scores, rules)])
        if few == 1024:
            assert 2 + 1 < len(sorted_lines) < len(rules) + 1
    for each in zip(*found, strict=True):
        assert all(torch.equal(one, each[0]) for one in each)


def test_a_tiny_temperature_is_greedy() -> None:
    for temperature in (1e-300, 5e-324):
        probs = distribution(line(), temperature=temperature)
        assert probs[line().argmax()] == 1 and probs.sum() == 1


def test_filters_keep_the_lowest_ids_of_equals() -> None:
    equal = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0])
    assert np.flatnonzero(distribution(equal, top_k=2)).tolist() == [0, 1]
    assert np.flatnonzero(distribution(equal, top_p=0.5)).tolist() == [0, 1, 2]


def test_weights_of_a_whole_vocabulary_do_not_overflow() -> None:
    size = 2**18
    weights = weighed(torch.zeros(1, size), [rule(temperature=1.0, top_p=0.5)])
    assert int((weights > 0).sum()) == size // 2 and int(weights.sum()) > 2**59
    assert int(weighed(torch.zeros(1, size), [rule(temperature=1.0)]).sum()) > 2**60


# Draws.


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"temperature": 0.5}], ids=str
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_follow_the_distribution(options: dict, over: str) -> None:
    """20,000 draws; the seeds are fixed: 7 over positions, 0.. over seeds."""
    num, options = 20_000, {"temperature": 1.0, **options}
    wanted = filtered(line(), SamplingParams(**options))
    if over == "positions":
        rules, position = [rule(seed=7, **options)] * num, torch.arange(num)
    else:
        rules, position = [rule(seed=seed, **options) for seed in range(num)], torch.full((num,), 31)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    chosen = choose(line().expand(num, V), rules, torch.zeros(num, dtype=torch.int64), position, ids)
    counts = np.bincount(chosen, minlength=V)
    assert counts[wanted == 0].sum() == 0
    pvalue = chisquare(counts[wanted > 0], wanted[wanted > 0] * num).pvalue
    print(f"p = {pvalue:.4f}")
    assert pvalue > 1e-3


@pytest.mark.parametrize("noise", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_noise_draw_a_token_that_was_kept(
    monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    monkeypatch.setattr(
        reference, "uniform", lambda seeds, position: torch.full((len(seeds),), noise, dtype=torch.float64)
    )
    for seed in range(200):
        chosen = choose_one(line(seed=seed), rule(temperature=1.0, top_k=3), [0])
        kept = np.flatnonzero(distribution(line(seed=seed), top_k=3))
        assert chosen == kept[0 if noise == 0 else -1]


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [  # Random123 1.14.0, kat_vectors: philox4x32 10
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([WORD] * 4, [WORD] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], wanted: str) -> None:
    a, b, c, d = (torch.full((9,), word) for word in counter)
    words = philox((a, b, c, d), (torch.full((9,), key[0]), torch.full((9,), key[1])))
    for place in range(9):
        assert " ".join(f"{int(word[place]):08x}" for word in words) == wanted


def test_uniform_is_philox_with_key_seed_and_counter_position() -> None:
    seed, position = 0x299F31D0A4093822, 0x85A308D3243F6A88 - 2**64 + 2**63
    a, b, _, _ = philox(
        tuple(torch.tensor([word]) for word in (position & WORD, position >> 32, 0, 0)),  # pyright: ignore
        (torch.tensor([seed & WORD]), torch.tensor([seed >> 32])),
    )
    assert drawn_with([seed], torch.tensor([position])).item() == ((int(a) << 21) + (int(b) >> 11)) / 2**53
    assert drawn_with([2**64 - 1], torch.tensor([5])) != drawn_with([2**32 - 1], torch.tensor([5]))
    many = drawn_with([3] * 20_000, torch.arange(20_000)).numpy()
    assert len(set(many)) == 20_000 and many.min() >= 0 and many.max() < 1
    assert chisquare(np.bincount((many * 50).astype(int), minlength=50)).pvalue > 1e-3
    assert drawn_with([0], torch.tensor([1])) != drawn_with([1], torch.tensor([0]))


# Lines.


def some_rules() -> list[Rule]:
    """Greedy, sampled, filtered and edited ones."""
    sampled = [{"temperature": 1.0, **options} for options in FILTERS]
    mixed = [{**options, **more} for options in EDITS for more in ({}, {"temperature": 2.0, "top_p": 0.95})]
    return [rule(seed=n, prompt_len=2, **options) for n, options in enumerate([{}, *sampled, *mixed])]


@pytest.mark.parametrize("size", [V, 5003, 70_001])
def test_a_line_does_not_depend_on_its_neighbours_bitwise(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = some_rules()
    scores = torch.stack([line(size, seed) for seed in range(len(rules))])
    histories = [[5, 4, *range(n % 7)] for n in range(len(rules))]
    together = choose_each(scores, rules, histories)
    assert together == [choose_one(*one) for one in zip(scores, rules, histories, strict=True)]
    back = choose_each(scores.flip(0), rules[::-1], histories[::-1])
    assert together == back[::-1]
    monkeypatch.setattr(sampling, "AT_ONCE", 3 * size)
    assert together == choose_each(scores, rules, histories)
    drawn = [n for n, own in enumerate(rules) if not own.greedy]
    weights = weighed(scores[drawn], [rules[n] for n in drawn])
    for place, n in enumerate(drawn):
        assert torch.equal(weights[place], weighed(scores[n : n + 1], [rules[n]])[0])
    several = logprobs(scores, torch.tensor(together), 3)
    for n in range(len(rules)):
        alone = logprobs(scores[n : n + 1], torch.tensor(together[n : n + 1]), 3)
        assert all(torch.equal(all_of[n], one[0]) for all_of, one in zip(several, alone, strict=True))


def test_rules_in_a_table_choose_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph reads them: every line through everything, whether its rule asks for that or not."""
    rules = [rule(seed=2**63 + 9, temperature=0.5, stop_ids=(3,)), *some_rules()]
    scores = torch.stack([line(V, seed) for seed in range(len(rules))])
    ids = torch.randint(
        0, V, (len(rules) + 1, 30), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    slot, position = torch.randperm(len(rules)) + 1, torch.arange(len(rules)) % 20 + 2
    table = RuleTable(len(rules) + 1, CPU)
    for slot_id in slot.tolist() * 2:  # whatever it held before
        table.open(slot_id, rules[int((slot == slot_id).nonzero())] if slot_id % 3 else rules[slot_id - 1])
    for slot_id, own in zip(slot.tolist(), rules, strict=True):
        table.open(slot_id, own)
    wanted = choose(scores, rules, slot, position, ids)
    assert torch.equal(choose(scores, [table.group(slot, True, ALL)], slot, position, ids), wanted)
    unedited = torch.tensor([not own.edits_logits for own in rules])
    found = choose(scores, [table.group(slot, False, ALL)], slot, position, ids)
    assert torch.equal(found[unedited], wanted[unedited]) and unedited.sum() > 5
    few = torch.tensor([not own.edits_logits and not sorts(own) and own.params.top_k < V for own in rules])
    most = max(own.params.top_k for own, is_few in zip(rules, few, strict=True) if is_few)
    monkeypatch.setattr(torch.Tensor, "sort", None)  # no vocabulary is sorted for these
    found = choose(scores[few], [table.group(slot[few], False, most)], slot[few], position[few], ids)
    assert torch.equal(found, wanted[few]) and few.sum() > 4 and 1 < most < V
    assert RuleTable.holds(rules[-1])
    assert not RuleTable.holds(rule(logit_bias={n: 1.0 for n in range(321)}))
    assert RuleTable.holds(rule(words=((1,) * 449,) + ((2,),) * 63))
    assert not RuleTable.holds(rule(words=((1,) * 450,)))
    assert not RuleTable.holds(rule(words=((2,),) * 65))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("size", [V, 70_001])
def test_a_gpu_chooses_the_same_tokens_and_never_waits(size: int) -> None:
    rules = some_rules()
    scores = torch.stack([line(size, seed) for seed in range(len(rules))])
    scores[0] = 1.0  # a tie of all
    ids = torch.randint(0, V, (len(rules), 30), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    slot, position = torch.arange(len(rules)), torch.arange(len(rules)) % 20 + 2
    wanted = choose(scores, rules, slot, position, ids)
    there = [tensor.cuda() for tensor in (scores, slot, position, ids)]
    for lines in (slice(None), slice(5, 6), slice(3, 19)):
        found = choose(there[0][lines], rules[lines], there[1][lines], there[2][lines], there[3])
        assert torch.equal(found.cpu(), wanted[lines])
    torch.cuda.set_sync_debug_mode("error")
    try:
        choose(there[0], rules, *there[1:])
        logprobs(there[0], there[1] % V, 3)
        broken(there[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    chosen = [own.cpu() for own in logprobs(there[0], there[1] % V, 3)]
    for own, cpu in zip(chosen, logprobs(scores, slot % V, 3), strict=True):
        torch.testing.assert_close(own, cpu)


def test_plain_greedy_lines_cost_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_choose", None)
    assert choose_each(torch.eye(4), [rule(top_k=3, stop_ids=(1,))] * 4, [[0]] * 4) == [0, 1, 2, 3]


def test_greedy_takes_the_lowest_id_of_an_exact_tie() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    for own in (rule(), rule(logit_bias={2: 0.5})):
        assert choose_each(scores, [own] * 2, [[0]] * 2) == [1, 0 if not own.edits_logits else 2]


def test_the_scores_of_the_caller_stay_as_they_are() -> None:
    scores = torch.stack([line(V, seed) for seed in range(len(some_rules()))])
    before = scores.clone()
    choose_each(scores, some_rules(), [[1, 2, 3]] * len(scores))
    assert torch.equal(scores, before)


def test_scores_of_all_tokens_are_not_copied_to_be_widened() -> None:
    scores = torch.randn(2, 5)
    assert sampling.widened(scores, 5) is scores
    assert torch.equal(sampling.widened(scores, 7), torch.cat([scores, torch.full((2, 2), -torch.inf)], 1))


def test_no_lines() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert choose(torch.empty(0, V), [], none, none, torch.zeros(2, 3, dtype=torch.int32)).tolist() == []
    assert broken(torch.empty(0, V)).tolist() == []
    assert to_logprobs([], *logprobs(torch.empty(0, V), none, 2)) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_line_of_nan_fails_alone(temperature: float) -> None:
    scores = torch.stack([line(V, seed) for seed in range(6)])
    own = [rule(temperature=temperature, top_p=0.9, frequency_penalty=1.0)] * 6
    wanted = choose_each(scores, own, [[1, 2]] * 6)
    scores[1, 7] = torch.nan
    scores[2] = torch.nan
    scores[3] = -torch.inf
    scores[4, 2] = torch.inf
    found = choose_each(scores, own, [[1, 2]] * 6)
    assert broken(scores).tolist() == [False, True, True, True, True, False]
    assert [found[0], found[5]] == [wanted[0], wanted[5]] and all(0 <= chosen < V for chosen in found)
    assert choose_one(scores[1], rule(), [1]) == 7


def test_masked_logits_are_not_broken() -> None:
    scores = torch.full((1, V), -torch.inf)
    scores[0, 3] = -4.0
    assert not broken(scores).any()
    assert choose_one(scores[0], rule(temperature=1.0, top_k=5, top_p=0.5), [0]) == 3


def test_logprobs_are_the_raw_log_softmax_whatever_the_filters() -> None:
    scores = torch.stack((line(), torch.zeros(V)))
    found = to_logprobs([4, 5], *logprobs(scores, torch.tensor([4, 5]), 3))
    wanted = torch.log_softmax(scores.double(), -1)
    assert all(isinstance(entry, Logprob) for entry in found)
    assert [entry.token_id for entry in found] == [4, 5]
    assert [entry.logprob for entry in found] == pytest.approx([float(wanted[0, 4]), float(wanted[1, 5])])
    assert [i for i, _ in found[0].top] == wanted[0].topk(3).indices.tolist()
    assert [p for _, p in found[0].top] == pytest.approx(wanted[0].topk(3).values.tolist())
    assert [i for i, _ in found[1].top] == [0, 1, 2]
    assert to_logprobs([3, 3], *logprobs(scores, torch.tensor([3, 3]), 0))[0].top == ()
    assert len(to_logprobs([3, 3], *logprobs(scores, torch.tensor([3, 3]), 20))[0].top) == V
