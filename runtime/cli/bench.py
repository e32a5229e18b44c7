"""`hemiola bench`"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hemiola.runtime.bench.options import BenchOptions
from hemiola.runtime.cli.options import given, made, only_engine, options_of, read, takes
from hemiola.runtime.cli.written import refuse_picture, refuse_unwritable
from hemiola.runtime.errors import Refused
from hemiola.runtime.options import ServeConfig
from hemiola.runtime.processes import environment

BUILT = ("max_len", "max_rows", "max_step_tokens", "drafts", "num_drafts")  # limits that build-engine asks


@takes(options_of(BenchOptions), options_of(ServeConfig))
def bench(
    engine: Annotated[str | None, typer.Argument(metavar="ENGINE", hidden=True)] = None,
    engine_dir: Annotated[
        Path | None, typer.Option(help="made by build-engine; the same as the argument ENGINE")
    ] = None,
    random_weights: Annotated[
        Path | None,
        typer.Option(
            help="folder with a config.json: build an engine with random weights from it, and measure that"
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write all numbers to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw distributions and throughput to this file")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="compare all tokens with the plain run: one request, no drafts, no reuse"
        ),
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(help="measure again with these engine options, NAME=VALUE,NAME=VALUE; may be repeated"),
    ] = None,
    **options: Any,
) -> None:
    """Measure an engine under load; print the table of `vllm bench serve`.

    Exit status 1: a request failed, or tokens differed.
    """
    from hemiola.runtime.bench.asked import Asked  # these import torch, which --help does not need
    from hemiola.runtime.bench.bench import BenchJob, run

    if json is not None:
        refuse_unwritable("--json", json)
    if plot is not None:
        refuse_picture(plot)
    asked = Asked(made(BenchOptions, options))
    variants = [parse_variant(changes) for changes in compare or []]
    engine_options = given(ServeConfig, options)
    folder = only_engine(engine_dir, engine) if engine is not None else engine_dir
    with _engine(folder, random_weights, engine_options) as opened:
        status = run(BenchJob(opened, asked, engine_options, variants, check, json, plot))
    if status:
        raise SystemExit(status)


@contextmanager
def _engine(engine_dir: Path | None, config: Path | None, options: Mapping[str, Any]) -> Iterator[Path]:
    """The engine that was named, or one made for the device that is here and removed afterwards."""
    if (engine_dir is None) == (config is None):
        message = "give one of --engine-dir DIR and --random-weights FOLDER"
        raise Refused("missing", "engine_dir", message=message)
    if engine_dir is not None:
        yield engine_dir
        return
    from hemiola.runtime.arch import arch_here

    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder, "engine")
        command = [str(config), "--random-weights", "--engine-dir", str(engine), "--arch", arch_here()]
        limits = {name: options[name] for name in BUILT if isinstance(options.get(name), int | str)}
        for name, value in limits.items():
            command += [] if value == "auto" else [f"--{name.replace('_', '-')}", str(value)]
        words = [sys.executable, "-P", "-m", "hemiola.builder", *command]
        built = subprocess.run(words, env=environment())
        if built.returncode:
            raise SystemExit(built.returncode)  # it has said why, and before that how far it was
        yield engine


def parse_variant(text: str) -> Mapping[str, object]:
    """Engine options from "drafts=none,prefix_cache=false"."""
    options: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not (name and equals and value.strip()):
            message = f"--compare {text!r} holds {part!r}"
            raise Refused("malformed", "compare", message=message, way_out="write NAME=VALUE,NAME=VALUE")
        if name in options:
            message = f"--compare {text!r} gives {name} twice"
            raise Refused("conflict", "compare", message=message, way_out="keep one")
        options[name] = read(ServeConfig, name, value.strip())
    return options
