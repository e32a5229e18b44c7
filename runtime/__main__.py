"""python -m hemiola.runtime"""

from hemiola.runtime.cli.main import main

main()
