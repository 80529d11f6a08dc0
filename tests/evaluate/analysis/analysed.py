"""The tiny run, copied, so that parts of the analysis can be made in it."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

from gnnlm.config import load_config
from gnnlm.evaluate.analysis.score_cache import CachedScores
from gnnlm.run import Run
from gnnlm.run.analyze import Analysis


@lru_cache
def analysis_of(root: Path) -> Analysis:
    """The analysis of a copy of a finished run, which lies beside it."""
    copy = root.with_name(f"{root.name}-analysed") / "run"
    shutil.copytree(root, copy)
    return Analysis(Run(load_config(copy), reading=True))


def results_of(run: Run, *parts: str) -> dict[str, Any]:
    """The results of these parts, and of those made before."""
    analysis = analysis_of(run.root)
    return analysis.build(analysis.plan(parts))


def scored_of(run: Run) -> CachedScores:
    """The pass over test that is kept; some part that reads it must have been made."""
    return CachedScores(analysis_of(run.root)._made["scored-test"])
