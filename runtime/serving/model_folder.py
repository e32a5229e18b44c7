"""Where the Triton model is: its config and its code."""

from pathlib import Path

import hemiola
from hemiola.runtime.errors import Refused


def find_model_folder() -> Path:
    """model_repo/hemiola of the checkout or of the installed package."""
    for home in hemiola.__path__:
        if (Path(home) / "model_repo/hemiola/config.pbtxt").is_file():
            return Path(home).resolve() / "model_repo/hemiola"
    message = f"no model_repo/hemiola in {list(hemiola.__path__)}"
    raise Refused("not_found", message=message, way_out="install hemiola again")
