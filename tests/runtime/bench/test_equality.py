"""Same tokens or not, and where not."""

from collections.abc import Sequence

from hemiola.runtime.api import Metrics, Output, SamplingParams
from hemiola.runtime.bench import equality
from hemiola.runtime.bench.measure import BenchResult


def result(session: int, prompt: list[int], answer: list[int], finish_reason: str = "length") -> BenchResult:
    made = BenchResult(session, 0, f"request {session}", prompt, SamplingParams(max_tokens=3), 0.0, 0.0)
    made.token_ids, made.finish_reason = answer, finish_reason
    return made


class Doubler:
    """Answers with the doubled prompt."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Output]:
        assert params.max_tokens == 3 and len(prompts) == 1, "alone"
        self.asked.append(list(prompts[0]))
        answer = [2 * token for token in prompts[0]]
        return [Output(list(prompts[0]), answer, "", "length", None, Metrics(1, 0.0))]


def test_the_plain_run_asks_everything_that_completed_once() -> None:
    engine, done = Doubler(), []
    runs = [
        [result(0, [1], [2]), result(1, [3], [6]), result(2, [3], [6])],
        [result(0, [1], [2]), result(1, [4], [9]), result(2, [5], [], "error")],
    ]
    answers = equality.plain_run(engine, runs, lambda: done.append(1))
    assert engine.asked == [[1], [3], [4]] and len(done) == 3
    assert equality.with_plain(runs[0], answers) == equality.Equality(3, 3, None)
    other = equality.with_plain(runs[1], answers)
    assert (other.num_equal, other.num_compared, other.holds) == (1, 2, False)
    assert other.difference == "request 1: 9 at position 0, the plain run has 8"


def test_an_answer_that_ends_early_differs() -> None:
    answers = equality.plain_run(Doubler(), [[result(0, [1, 2], [2])]])
    same = equality.with_plain([result(0, [1, 2], [2])], answers)
    assert same.difference == "request 0: no token at position 1, the plain run has 4"


def test_nothing_compared_is_not_equal() -> None:
    assert not equality.with_plain([result(0, [1], [], "error")], {}).holds


def test_across_variants_prompts_and_answers_must_be_the_same() -> None:
    base = [result(0, [1], [2]), result(1, [1], [2]), result(2, [1], [2]), result(3, [1], [2])]
    other = [result(0, [1], [2]), result(1, [1], [3]), result(2, [4], [2]), result(3, [1], [2], "error")]
    assert equality.across([base, base]) == equality.Equality(4, 4, None)
    same = equality.across([base, base, other])
    assert (same.num_equal, same.num_compared) == (1, 3)
    assert same.difference == "request 1: 2 at position 1, another variant has 3"


def test_plain_options_keep_the_longest_request_and_switch_the_rest_off() -> None:
    given = {"max_len": 64, "max_rows": 4, "num_pages": 9, "drafts": "mtp", "prefix_cache": True}
    assert equality.plain_options(given) == {
        "max_len": 64, "max_rows": 1, "drafts": "none", "prefix_cache": False,
    }  # fmt: skip
