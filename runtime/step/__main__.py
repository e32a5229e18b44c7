"""python -m hemiola.runtime.step: compile every kernel for this CPU now, so that no start waits for it."""

from hemiola.plugins import OPS
from hemiola.runtime.progress import show
from hemiola.runtime.step.ahead import compile_ahead


def main() -> None:
    with show(True) as report:
        compile_ahead(OPS, report)


if __name__ == "__main__":
    main()
