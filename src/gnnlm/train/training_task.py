"""The interface between the training loop and what it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from gnnlm.train.processes import Processes

Log = Callable[[str, float, int], None]  # name, value, step
Report = Callable[[int, int], None]  # tokens done, of how many


@dataclass(frozen=True)
class Validation:
    """The loss to minimize, the losses recorded in the history with it, and a summary for the progress line."""

    loss: float
    history: dict[str, float]
    words: str


class TrainingTask(Protocol):
    """A model, its data and its loss."""

    @property
    def model(self) -> nn.Module: ...

    def start(self, device: torch.device, processes: Processes) -> None:
        """Move everything but the model to the device, and read the share of this process from now on."""

    def tokens(self, step: int) -> int:
        """How many tokens a step predicts, in all its parts and in all processes."""
        ...

    def loss(self, step: int, part: int) -> Tensor:
        """The loss of this process's lines of a part of a step's batch, summed over their tokens."""
        ...

    def keep(self) -> None:
        """Keep what the step has left beside its gradients; called when the step went well in every process."""

    def validate(self, step: int, report: Report) -> Validation:
        """The losses on held-out text; calls `report` as it goes."""
        ...

    def train_losses(self) -> dict[str, float]:
        """Losses on a small fixed sample of the training text, for the history; may be empty."""
        ...

    def note(self, step: int) -> str:
        """A short note about the step, for the progress line."""
        ...

    def save(self, path: Path) -> None:
        """Write the files of the best step into a folder of their own."""

    def carried(self) -> dict[str, Tensor]:
        """Tensors other than the weights that the next step depends on, in the first process of all processes."""
        ...

    def carry(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `carried` returned."""
