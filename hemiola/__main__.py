"""python -m hemiola"""

from hemiola.runtime.__main__ import main

main()
