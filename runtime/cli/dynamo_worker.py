"""`hemiola dynamo-worker`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from hemiola.runtime.cli.options import given, made, only_engine, options_of, takes
from hemiola.runtime.dynamo.options import WorkerOptions
from hemiola.runtime.options import ServeConfig


@takes(options_of(WorkerOptions), options_of(ServeConfig))
def dynamo_worker(
    engine: Annotated[str | None, typer.Argument(metavar="ENGINE", hidden=True)] = None,
    engine_dir: Annotated[
        Path | None, typer.Option(help="made by build-engine; the same as the argument ENGINE")
    ] = None,
    **options: Any,
) -> None:
    """Serve an engine as a worker of NVIDIA Dynamo until SIGINT or SIGTERM.

    Dynamo's own frontend (`python -m dynamo.frontend`) has the callers' API.
    """
    from hemiola.runtime.dynamo.worker import run_worker  # imports torch, which --help does not need

    folder = only_engine(engine_dir, engine)
    run_worker(folder, made(WorkerOptions, options), given(ServeConfig, options), _say)


def _say(line: str) -> None:
    print(line, flush=True)
