"""The command line. Wiring and words only: every command is a few calls into the rest.

`main` is the entry point; the commands themselves are imported inside it, so that Ctrl-C is one line from the start.
"""

from gnnlm.cli.main import main

__all__ = ["main"]
