"""python -m hemiola.runtime.engine: compile every kernel for this CPU now, so that no start waits for it."""

from importlib import import_module
from importlib.util import find_spec

from hemiola.plugins import OPS
from hemiola.plugins.cpu import jit
from hemiola.runtime.step import recorded  # noqa: F401  its kernels are known when it is imported


def main() -> None:
    for op in OPS:
        if find_spec(f"hemiola.plugins.{op}.compiled"):
            import_module(f"hemiola.plugins.{op}.compiled")
    jit.prepare()


if __name__ == "__main__":
    main()
