"""`hemiola bench`"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hemiola.runtime.bench.bench import Job, run
from hemiola.runtime.bench.options import BenchOptions
from hemiola.runtime.cli.options import parse_value
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Refused

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


ENGINE_FLAGS = ", ".join(map(_flag, ServeConfig.model_fields))
EPILOG = f"Options of the engine, each with a value: {ENGINE_FLAGS}."


def main(args: Sequence[str]) -> None:
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command(context_settings=PASS_ON, epilog=EPILOG)(bench)
    command(args=list(args), prog_name="hemiola bench", standalone_mode=False)


def bench(
    context: typer.Context,
    engine_dir: Annotated[Path, typer.Option(help="made by build-engine")],
    workload: Annotated[
        str, typer.Option(help="random, multi-turn, or a file of JSON lines: prompts, chats or ShareGPT")
    ] = "random",
    num_requests: Annotated[
        int | None, typer.Option(help="how many in all; default 32, or all of a file", show_default=False)
    ] = None,
    input_len: Annotated[int, typer.Option(help="tokens of a prompt, or of what each turn adds")] = 256,
    output_len: Annotated[int, typer.Option(help="tokens to generate, where a file does not say")] = 64,
    random_range_ratio: Annotated[
        float, typer.Option(help="lengths vary by this share of themselves, 0 to below 1")
    ] = 0.0,
    turns: Annotated[int, typer.Option(help="multi-turn: requests of a session")] = 4,
    system_len: Annotated[
        int, typer.Option(help="multi-turn: tokens that the sessions of a group share")
    ] = 128,
    num_groups: Annotated[int, typer.Option(help="multi-turn: different shared beginnings")] = 1,
    think_time: Annotated[
        float, typer.Option(help="multi-turn: mean seconds from answer to next turn")
    ] = 0.0,
    text: Annotated[
        Path | None,
        typer.Option(help="take prompts from this text; default: multi-turn Python's library, random none"),
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos", help="default: ignored, but not for files", show_default=False
        ),
    ] = None,
    request_rate: Annotated[float, typer.Option(help="sessions per second; inf: as places allow")] = math.inf,
    burstiness: Annotated[float, typer.Option(help="of arrivals: 1 Poisson, less in bursts, inf even")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(help="sessions at a time; default: no limit", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="same seed, same requests at the same times")] = 0,
    num_warmups: Annotated[int, typer.Option(help="short requests before the clock starts")] = 1,
    json: Annotated[Path | None, typer.Option(help="write all numbers to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw distributions and throughput to this file")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="run all again, alone, without drafts and reuse; same tokens?")
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="a further column with these engine options, NAME=VALUE,NAME=VALUE; may be repeated"
        ),
    ] = None,
) -> None:
    """Measure an engine under load; print the table of `vllm bench serve`.

    Exit status 1: a request failed, or tokens differed.
    """
    options = BenchOptions(
        workload=workload,
        num_requests=num_requests,
        input_len=input_len,
        output_len=output_len,
        random_range_ratio=random_range_ratio,
        turns=turns,
        system_len=system_len,
        num_groups=num_groups,
        think_time=think_time,
        text=text,
        ignore_eos=ignore_eos,
        request_rate=request_rate,
        burstiness=burstiness,
        concurrency=concurrency,
        seed=seed,
        num_warmups=num_warmups,
    )
    variants = [parse_variant(changes) for changes in compare or []]
    status = run(Job(engine_dir, options, parse_engine_options(context.args), variants, check, json, plot))
    if status:
        raise SystemExit(status)


def parse_engine_options(args: Sequence[str]) -> dict[str, object]:
    """What no option of the benchmark took: --NAME VALUE or --NAME=VALUE, for ServeConfig."""
    found: dict[str, object] = {}
    rest = list(args)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in ServeConfig.model_fields:
            raise Refused(
                f"unknown argument {flag!r}; see hemiola bench --help; the engine's are {ENGINE_FLAGS}"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise Refused(f"{flag} has no value; write {flag} VALUE")
            value = rest.pop(0)
        if name in found:
            raise Refused(f"{flag} is given twice; keep one")
        found[name] = parse_value(value)
    return found


def parse_variant(text: str) -> Mapping[str, object]:
    """Engine options from "drafts=none,prefix_cache=false": values are JSON, or else plain words."""
    found: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not (name and equals and value.strip()):
            raise Refused(f"--compare {text!r} holds {part!r}; write NAME=VALUE,NAME=VALUE")
        if name in found:
            raise Refused(f"--compare {text!r} gives {name} twice; keep one")
        found[name] = parse_value(value.strip())
    return found
