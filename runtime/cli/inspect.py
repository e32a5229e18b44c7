"""`hemiola inspect`"""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from hemiola.runtime.cli.options import made, only_engine, options_of, takes
from hemiola.runtime.cli.written import refuse_picture
from hemiola.runtime.options import ServeConfig


@takes(options_of(ServeConfig))
def inspect(
    engine: Annotated[str | None, typer.Argument(metavar="ENGINE", hidden=True)] = None,
    engine_dir: Annotated[
        Path | None, typer.Option(help="made by build-engine; the same as the argument ENGINE")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw layers, states and drafts into this file (.png, .svg, .pdf)")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object for programs")] = False,
    **options: Any,
) -> None:
    """Show what an engine is, after checking that it is whole, and the memory that it takes when it is opened
    with these options."""
    from hemiola.runtime import manifest  # these import torch, which --help does not need
    from hemiola.runtime.cli.graph_plot import draw
    from hemiola.runtime.cli.inspected import described, show

    if plot is not None:
        refuse_picture(plot)
    config = made(ServeConfig, options)
    folder = only_engine(engine_dir, engine)
    loaded = manifest.load(folder)
    if json:
        print(dumps(described(folder, loaded, config), indent=1))
    else:
        show(folder, loaded, config)
    if plot is not None:
        draw(plot, loaded)
        print(f"drawn: {plot}", file=sys.stderr if json else sys.stdout)
