"""The command `hemiola`; python -m hemiola.runtime"""

from hemiola.runtime.extra import or_exit


def main() -> None:
    with or_exit("hemiola"):
        from hemiola.runtime.cli.main import main as run

        run()


if __name__ == "__main__":
    main()
