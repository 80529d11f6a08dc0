"""The interface between the training loop and what it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gnnlm.train.processes import ALONE, Processes

Log = Callable[[str, float, int], None]  # name, value, step
Report = Callable[[int, int], None]  # tokens done, of how many


@dataclass(frozen=True)
class Validation:
    """The loss to minimize, the losses recorded in the history with it, and a summary for the progress line."""

    loss: float
    history: dict[str, float]
    words: str


class TrainingTask(ABC):
    """A model, its data and its loss."""

    model: nn.Module
    processes: Processes = ALONE
    device = torch.device("cpu")

    def start(self, device: torch.device, processes: Processes = ALONE) -> None:
        """Move everything but the model to the device, and read the share of this process from now on."""
        self.device, self.processes = device, processes

    @abstractmethod
    def tokens(self, step: int) -> int:
        """Return how many tokens a step predicts, in all its parts and in all processes."""

    @abstractmethod
    def loss(self, step: int, part: int) -> Tensor:
        """Return the loss of this process's lines of a part of a step's batch, summed over their tokens."""

    @abstractmethod
    def validate(self, step: int, report: Report) -> Validation:
        """Return the losses on held-out text, calling `report` along the way."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files of the best step into a folder of their own."""

    def step_done(self) -> None:  # noqa: B027  most tasks have nothing to do
        """Keep what the step has left besides its gradients. Called after every step, if no process has failed."""

    def train_losses(self) -> dict[str, float]:
        """Return losses on a small fixed sample of the training text, for the history."""
        return {}

    def note(self, step: int) -> str:
        """Return a short note about the step, for the progress line."""
        return ""

    def carried(self) -> dict[str, Tensor]:
        """Return tensors besides the weights that the next step depends on; the first process returns those of all."""
        return {}

    def carry(self, tensors: dict[str, Tensor]) -> None:  # noqa: B027  most tasks carry nothing
        """Restore what `carried` returned."""
