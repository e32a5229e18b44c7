"""The straight line of a benchmark: variants measured one after another, compared, reported."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import hemiola
from hemiola.runtime import outline
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.bench import equality, workloads
from hemiola.runtime.bench.asked import Asked
from hemiola.runtime.bench.equality import Equality
from hemiola.runtime.bench.measure import BenchResult, Mailbox, Measured, Run
from hemiola.runtime.bench.plot import Curve, plot
from hemiola.runtime.bench.report import Column, table
from hemiola.runtime.bench.statistics import Summary, summarize
from hemiola.runtime.bench.workloads import Turns
from hemiola.runtime.config import ENDLESS, ServeConfig, resolve
from hemiola.runtime.errors import Refused, in_python, within
from hemiola.runtime.llm import LLM

SHOWN_FAILURES = 10
INTERRUPTED, UNEQUAL_OR_FAILED = 130, 1


@dataclass(frozen=True)
class BenchJob:
    """A benchmark as it was asked for. The engine's options are those of ServeConfig."""

    engine_dir: Path
    asked: Asked
    engine_options: Mapping[str, Any]
    compare: Sequence[Mapping[str, Any]] = ()
    check: bool = False
    json_path: Path | None = None
    plot_path: Path | None = None


class BenchVariant(NamedTuple):
    name: str
    options: Mapping[str, Any]


class Finding(NamedTuple):
    variant: BenchVariant
    measured: Measured
    summary: Summary


class Statement(NamedTuple):
    text: str
    equality: Equality


Progress = Callable[[], None]  # one more is done


def run(job: BenchJob) -> int:
    """Prints the table; the exit status says whether all requests completed and all tokens were equal."""
    variants = _variants(job)
    _refuse_unfit(job, variants)
    bench = _Bench(job)
    findings, refusal = bench.measure_all(variants)
    settings = bench.settings()
    print(table([Column(finding.variant.name, settings | finding.summary) for finding in findings]))
    _print_failures(findings)
    interrupted = findings[-1].measured.interrupted
    statements = [] if interrupted else bench.statements(findings)
    for statement in statements:
        print(statement.text)
        if statement.equality.difference is not None:
            print(f"  first difference: {statement.equality.difference}")
    if job.json_path is not None:
        job.json_path.write_text(json.dumps(_report(job, settings, findings, statements), indent=1) + "\n")
    if job.plot_path is not None:
        title = f"{job.engine_dir.name}, {job.asked.options.workload}, seed {job.asked.options.seed}"
        plot(job.plot_path, title, [Curve(finding.variant.name, finding.measured) for finding in findings])
    if refusal is not None:
        raise refusal
    if interrupted:
        return INTERRUPTED
    failed = any(finding.summary["failed"] for finding in findings)
    return UNEQUAL_OR_FAILED if failed or not all(s.equality.holds for s in statements) else 0


def _variants(job: BenchJob) -> list[BenchVariant]:
    """The engine as started, then with each set of changes. Unknown options are refused at once."""
    base = BenchVariant(_name(job.engine_options) or "defaults", job.engine_options)
    variants = [
        base,
        *(BenchVariant(_name(changes), {**job.engine_options, **changes}) for changes in job.compare),
    ]
    for number, variant in enumerate(variants):
        with _of_variant(variant, number):
            ServeConfig(**variant.options)
    return variants


def _refuse_unfit(job: BenchJob, variants: Sequence[BenchVariant]) -> None:
    """What does not fit the engine, before any variant is measured. Memory is counted at its opening."""
    engine = outline.parse(job.engine_dir / outline.FILE)
    for number, variant in enumerate(variants):
        with _of_variant(variant, number):
            sizes = resolve(ServeConfig(**variant.options), engine, ENDLESS)
            job.asked.refuse_too_long(sizes.max_len)


def _of_variant(variant: BenchVariant, number: int) -> AbstractContextManager[None]:
    """What is refused within names it; the first has the command's own options."""
    return within(f"--compare {variant.name}", in_python) if number else nullcontext()


def _name(options: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={json.dumps(value).strip(chr(34))}" for name, value in options.items())


class _Bench:
    """What the variants have in common: the workload, made with the first of them, and the engine's facts."""

    def __init__(self, job: BenchJob) -> None:
        self.job = job
        self.options = job.asked.options
        self._architecture = ""
        self._sessions: list[Turns] | None = None

    def measure_all(self, variants: Sequence[BenchVariant]) -> tuple[list[Finding], Refused | None]:
        """Up to Ctrl-C, or to a variant that the engine refuses: what was measured by then is not lost."""
        findings: list[Finding] = []
        for variant in variants:
            try:
                findings.append(self.measure(variant))
            except Refused as refusal:
                if not findings:
                    raise
                return findings, refusal.at(f"--compare {variant.name}", in_python)
            if findings[-1].measured.interrupted:
                break
        return findings, None

    def measure(self, variant: BenchVariant) -> Finding:
        _say(f"opening {self.job.engine_dir} ({variant.name})")
        with LLM(self.job.engine_dir, progress=True, **variant.options) as llm:
            self._architecture = llm.manifest.architecture
            if self._sessions is None:
                self._sessions = self.job.asked.sessions(llm)
            _warm_up(llm, self.options.num_warmups)
            before = asdict(llm.counters)
            measured = self._run(llm, self._sessions)
            after = asdict(llm.counters)
        counted = {name: after[name] - before[name] for name in after}
        return Finding(variant, measured, summarize(measured) | {"engine_counters": counted})

    def _run(self, llm: LLM, sessions: Sequence[Turns]) -> Measured:
        options = self.options
        rate, arrivals = options.request_rate, None
        if math.isfinite(rate):
            arrivals = workloads.arrivals(len(sessions), rate, options.burstiness, options.seed)
        with _progress("measuring", sum(map(len, sessions))) as advance:
            run = Run(
                llm,
                sessions,
                arrivals,
                options.concurrency,
                options.eos_ignored,
                Mailbox(),
                on_result=lambda result: advance(),
            )
            return run()

    def statements(self, findings: Sequence[Finding]) -> list[Statement]:
        """What can be said of the tokens."""
        runs = [finding.measured.results for finding in findings]
        lines = []
        if len(runs) > 1:
            same = equality.across(runs)
            lines.append(_statement(f"across {len(runs)} variants", same, findings))
        if self.job.check:
            answers = self._plain_answers(runs)
            for finding in findings:
                same = equality.with_plain(finding.measured.results, answers)
                name = f"to the plain run ({finding.variant.name})" if len(runs) > 1 else "to the plain run"
                lines.append(_statement(name, same, [finding]))
        return lines

    def _plain_answers(self, runs: Sequence[Sequence[BenchResult]]) -> dict[equality.Question, list[int]]:
        options = equality.plain_options(self.job.engine_options)
        with (
            LLM(self.job.engine_dir, progress=True, **options) as llm,
            _progress("plain run", len(equality.distinct(runs))) as advance,
        ):
            return equality.plain_run(llm, runs, advance)

    def settings(self) -> dict[str, object]:
        """Under the names of `vllm bench serve` where it has one."""
        options = self.options
        return {
            "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
            "hemiola_version": hemiola.__version__,
            "model_id": str(self.job.engine_dir),
            "architecture": self._architecture,
            "dataset_name": options.workload,
            "num_prompts": sum(map(len, self._sessions or [])),
            "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
            "burstiness": options.burstiness if math.isfinite(options.burstiness) else "inf",
            "max_concurrency": options.concurrency,
            "options": json.loads(options.model_dump_json()),
        }


def _warm_up(llm: LLM, count: int) -> None:
    """Prompts of one token leave nothing to reuse."""
    if count:
        ids = [[index % llm.manifest.vocab_size] for index in range(count)]
        llm.generate(ids, SamplingParams(max_tokens=8, ignore_eos=True))


def _statement(what: str, same: Equality, findings: Sequence[Finding]) -> Statement:
    planned = max(finding.measured.num_planned for finding in findings)
    text = f"tokens equal {what}: {same.num_equal} of {same.num_compared}"
    if same.num_compared < planned:
        text += f" ({planned - same.num_compared} did not complete)"
    return Statement(text, same)


def _print_failures(findings: Sequence[Finding]) -> None:
    for finding in findings:
        errors = [error for error in finding.summary["errors"] if error]
        for error in errors[:SHOWN_FAILURES]:
            _say(f"failed ({finding.variant.name}): {error}")
        if len(errors) > SHOWN_FAILURES:
            _say(f"failed ({finding.variant.name}): and {len(errors) - SHOWN_FAILURES} more")


def _report(
    job: BenchJob, settings: Mapping[str, Any], findings: Sequence[Finding], statements: Sequence[Statement]
) -> dict[str, object]:
    """The first variant's numbers at the top, as `vllm bench serve` writes them; the others in a list."""
    columns = [
        {"variant": finding.variant.name, "engine_options": dict(finding.variant.options), **finding.summary}
        for finding in findings
    ]
    equal = [{"statement": statement.text, **statement.equality._asdict()} for statement in statements]
    compared = {"compared": columns[1:]} if job.compare else {}
    return {**settings, **columns[0], "tokens_equal": equal, **compared}


@contextmanager
def _progress(what: str, total: int) -> Iterator[Progress]:
    """A bar on a terminal's stderr; otherwise one line."""
    from rich.console import Console  # not needed without a terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        _say(f"{what}: {total} requests")
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
