"""python -m gnnlm"""

from gnnlm.cli import main

main()
