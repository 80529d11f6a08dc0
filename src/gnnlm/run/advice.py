"""Which command mends what is wrong with an artifact."""

from __future__ import annotations

import shlex
from pathlib import Path

from gnnlm.errors import ArtifactError
from gnnlm.layout import is_added, is_refitted, run_of

PART_OF_STAGE = {"tune": "mix", "index": "index"}  # what `gnnlm refit --part` calls a stage; any other is `gnn`


def advice_for(error: ArtifactError) -> str:
    """Return what to do about an error that artifacts have raised; empty if its message says so already."""
    path = error.path
    if path is None:
        return ""
    match error.fault:
        case "missing":
            return f"make it again: {rebuild_command(path)}" if is_refitted(path) else "build it with gnnlm run"
        case "damaged" | "outdated":
            return f"rebuild it: {rebuild_command(path)}"
        case "unreadable":  # a rebuild would not touch a folder that cannot say what is gnnlm's own
            if is_added(path) or is_refitted(path):
                return f"rebuild it: {rebuild_command(path)}"
            return f"delete {path}, if nothing in it is yours, and run again"
        case "erased":
            return (
                "serving does not need it, but this does: build another run from the text that is left (what was "
                f"erased: gnnlm history {shlex.quote(str(run_of(path)))})"
            )
        case "other inputs":
            return "discard it with --rebuild, or choose another run directory (run: in the config)"
        case "no room":
            return "or choose another run directory (run: in the config)"
        case None:
            return ""


def rebuild_command(path: Path) -> str:
    """Return the command that rebuilds the artifact at `path`."""
    run = shlex.quote(str(run_of(path)))
    if is_refitted(path):
        return f"gnnlm refit {run} --part {PART_OF_STAGE.get(path.name, 'gnn')}"
    return f"gnnlm renew {run}" if is_added(path) else f"gnnlm run {run} --rebuild"


ArtifactError.advise = staticmethod(advice_for)
