"""Processes that we start, and those that a user forks from ours."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import hemiola

P = ParamSpec("P")


def environment() -> dict[str, str]:
    """Of a Python process that imports our package, whatever folder it stands in."""
    root = str(Path(hemiola.__file__).resolve().parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # an empty one is the folder it stands in
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, paths)])}


def only_here(act: Callable[P, object]) -> Callable[P, None]:
    """For what is called at an object's or a process's end: a fork of this process has the object, too, but
    what it stands for (a process, a socket, threads) is this one's."""
    pid = os.getpid()

    @functools.wraps(act)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.getpid() == pid:
            act(*args, **kwargs)

    return guarded
