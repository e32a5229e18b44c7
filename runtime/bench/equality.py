"""Were the tokens the same? In all variants; and in the plain run: alone, without drafts and reuse."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from hemiola.runtime.api import Output, SamplingParams
from hemiola.runtime.bench.measure import BenchResult

# Sizes that decide what an engine can answer at all; everything else is left as it is by default.
KEPT = ("max_len", "memory_fraction")
PLAIN: dict[str, object] = {"drafts": "none", "prefix_cache": False, "max_rows": 1}
Question = tuple[tuple[int, ...], int]  # prompt, max_tokens


class Plain(Protocol):
    """An LLM that was opened with plain_options."""

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Output]: ...


class Equality(NamedTuple):
    num_equal: int
    num_compared: int
    difference: str | None  # the first one

    @property
    def holds(self) -> bool:
        return 0 < self.num_compared == self.num_equal


def plain_options(options: Mapping[str, object]) -> dict[str, object]:
    """Options for the plain run."""
    return {name: value for name, value in options.items() if name in KEPT} | PLAIN


def plain_run(
    engine: Plain, runs: Sequence[Sequence[BenchResult]], on_answer: Callable[[], None] = lambda: None
) -> dict[Question, list[int]]:
    """Everything that was answered, asked again one by one."""
    answers: dict[Question, list[int]] = {}
    for result in distinct(runs):
        [output] = engine.generate([result.prompt_ids], result.params)
        answers[_asked(result)] = output.token_ids
        on_answer()
    return answers


def distinct(runs: Sequence[Sequence[BenchResult]]) -> list[BenchResult]:
    """One completed request for each thing asked."""
    return list({_asked(result): result for run in runs for result in run if result.completed}.values())


def with_plain(run: Sequence[BenchResult], answers: Mapping[Question, list[int]]) -> Equality:
    done = [result for result in run if result.completed]
    return _compare(
        [(result.origin, result.token_ids, answers[_asked(result)]) for result in done], "the plain run"
    )


def across(runs: Sequence[Sequence[BenchResult]]) -> Equality:
    """Of the requests that completed in all runs, how many got the same prompt and the same answer in all."""
    by_key = [{result.key: result for result in run if result.completed} for run in runs]
    pairs = []
    for key in sorted(set(by_key[0]).intersection(*by_key[1:])):
        first = by_key[0][key]
        # Histories that differ make prompts that differ: show the worst one.
        others = [_all_ids(other[key]) for other in by_key[1:]]
        worst = next((other for other in others if other != _all_ids(first)), _all_ids(first))
        pairs.append((first.origin, _all_ids(first), worst))
    return _compare(pairs, "another variant")


def _compare(pairs: Sequence[tuple[str, list[int], list[int]]], other: str) -> Equality:
    differences = [pair for pair in pairs if pair[1] != pair[2]]
    difference = _describe(*differences[0], other) if differences else None
    return Equality(len(pairs) - len(differences), len(pairs), difference)


def _describe(origin: str, left: list[int], right: list[int], other: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    mine, theirs = (str(ids[at]) if at < len(ids) else "no token" for ids in (left, right))
    return f"{origin}: {mine} at position {at}, {other} has {theirs}"


def _asked(result: BenchResult) -> Question:
    return tuple(result.prompt_ids), result.params.max_tokens


def _all_ids(result: BenchResult) -> list[int]:
    return result.prompt_ids + result.token_ids
