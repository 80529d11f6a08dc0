"""Runs that an analysis may write into: copies of the shared tiny run, with changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from gnnlm.config import parse_config
from gnnlm.run import Run
from tests.conftest import merge


def copied_run(run: Run, folder: Path, **changes: Any) -> Run:
    """A copy of a finished run; what the changes make stale is built again."""
    root = Path(shutil.copytree(run.root, folder / "run", ignore=shutil.ignore_patterns("analysis")))
    copy = Run(parse_config(merge(run.config.model_dump(mode="json"), {"run": str(root), **changes})))
    copy.build_all(rebuild=bool(changes))
    return copy
