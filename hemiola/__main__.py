"""python -m hemiola"""

from hemiola.runtime.cli.main import main

main()
