"""python -m hemiola"""

from hemiola.runtime.cli import main

main()
