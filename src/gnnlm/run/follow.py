"""What the processes of a launcher do beside the first, which runs the command: they join in when it trains."""

from __future__ import annotations

import os
import traceback
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Draft
from gnnlm.config import parse_config
from gnnlm.errors import TrainingError
from gnnlm.progress import be_silent
from gnnlm.run.run import Run
from gnnlm.run.stages import STAGES

if TYPE_CHECKING:
    from gnnlm.train.processes import Processes


def follow(processes: Processes) -> None:
    """Carry out the orders of the first process until it dismisses this one.

    What goes wrong here is told to the first process, which ends with it as its own error.
    """
    be_silent()
    while (order := processes.tell()) is not None:
        with suppress(Exception), processes.together():
            try:
                _train(order)
            except Exception:
                if os.environ.get("GNNLM_DEBUG"):
                    traceback.print_exc()
                raise


def _train(order: dict[str, Any]) -> None:
    """Train with the others. The artifact is written by the first process; the draft here is left empty."""
    run = Run(parse_config(order["config"]), reading=True)
    if not (run.root / "config.yaml").is_file():
        raise TrainingError(f"{run.root.absolute()} is not there; it must be on a disk that all processes share")
    stage = STAGES[order["stage"]]
    with TemporaryDirectory(prefix="gnnlm-") as folder, Draft(Path(folder) / stage.folder, stage.name, {}) as draft:
        stage.build(run.context(stage), draft)
