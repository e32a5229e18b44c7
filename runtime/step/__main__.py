"""python -m hemiola.runtime.step: compile every kernel for this CPU now, so that no start waits for it."""

from importlib import import_module
from importlib.util import find_spec

from hemiola.plugins import OPS
from hemiola.plugins.cpu import jit
from hemiola.plugins.step import import_forms


def main() -> None:
    for op in OPS:
        if find_spec(f"hemiola.plugins.{op}.compiled"):
            import_module(f"hemiola.plugins.{op}.compiled")
    import_forms("compiled")
    jit.prepare()


if __name__ == "__main__":
    main()
