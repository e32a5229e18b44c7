"""The command `build-engine`; python -m hemiola.builder"""

from hemiola.runtime.extra import or_exit


def main() -> None:
    with or_exit("build-engine"):
        from hemiola.builder.cli import main as run

        run()


if __name__ == "__main__":
    main()
