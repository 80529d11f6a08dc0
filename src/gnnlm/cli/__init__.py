"""The command line: every command is a few calls into the pipeline.

`main` is the entry point. It imports the commands itself, so that Ctrl-C prints one line even during the imports.
"""

from gnnlm.cli.main import main

__all__ = ["main"]
