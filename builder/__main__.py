"""python -m hemiola.builder"""

from hemiola.builder.cli import main

main()
