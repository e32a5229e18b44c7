"""python -m hemiola.runtime"""

from hemiola.runtime.cli import main

main()
