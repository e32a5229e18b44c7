"""Files that a command writes when it is done: what cannot be written is refused before."""

import os
from importlib import util
from pathlib import Path

from hemiola.runtime.errors import Refused
from hemiola.runtime.extra import install


def refuse_picture(path: Path) -> None:
    """What cannot become a picture, before there is anything to draw."""
    if util.find_spec("matplotlib") is None:
        message = "--plot needs matplotlib, which is missing"
        raise Refused("not_found", "plot", message=message, way_out=f"{install('bench')} or leave --plot out")
    refuse_unwritable("--plot", path)
    from matplotlib.backend_bases import FigureCanvasBase  # optional, and slow to import

    if path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        message = f"--plot {path} ends in {path.suffix or 'no suffix'}, which is no kind of picture"
        raise Refused("unsupported", message=message, way_out="give a path that ends in .png, .svg or .pdf")


def refuse_unwritable(flag: str, path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        message = f"{flag} {path} cannot be written: give a file that you may write, in a folder that exists"
        raise Refused("not_found", message=message)
