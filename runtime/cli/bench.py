"""`hemiola bench`"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hemiola.runtime.bench.bench import Job, run
from hemiola.runtime.bench.options import BenchOptions
from hemiola.runtime.cli.options import given, options_of, read, takes
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Refused


@takes(options_of(BenchOptions), options_of(ServeConfig))
def bench(
    engine_dir: Annotated[Path, typer.Option(help="made by build-engine")],
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
    **options: Any,
) -> None:
    """Measure an engine under load; print the table of `vllm bench serve`.

    Exit status 1: a request failed, or tokens differed.
    """
    asked = BenchOptions(**given(BenchOptions, options))
    variants = [parse_variant(changes) for changes in compare or []]
    status = run(Job(engine_dir, asked, given(ServeConfig, options), variants, check, json, plot))
    if status:
        raise SystemExit(status)


def parse_variant(text: str) -> Mapping[str, object]:
    """Engine options from "drafts=none,prefix_cache=false"."""
    found: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not (name and equals and value.strip()):
            raise Refused(f"--compare {text!r} holds {part!r}; write NAME=VALUE,NAME=VALUE")
        if name in found:
            raise Refused(f"--compare {text!r} gives {name} twice; keep one")
        found[name] = read(ServeConfig, name, value.strip())
    return found
