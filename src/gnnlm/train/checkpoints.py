"""What a training saves while it runs: its record, its last checkpoint and the files of its best step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnnlm.artifact import Draft, disk, writing
from gnnlm.errors import ModelError, TrainingError
from gnnlm.lm.tensor_file import load_tensors, save_tensors
from gnnlm.train.training_task import TrainingTask

Entry = dict[str, float | None]  # one validation: `step`, the mean training `loss` before it, and the losses found


class BestStep(TypedDict):
    """The validation with the lowest loss so far."""

    step: int
    loss: float


@dataclass
class TrainingRecord:
    """The progress of a training without its tensors, saved in the draft's notes."""

    history: list[Entry] = field(default_factory=list)
    best: BestStep = field(default_factory=lambda: BestStep(step=0, loss=math.inf))
    worse: int = 0  # validations since the best one
    checkpoint: int = 0  # steps done when the last checkpoint was written
    loss: float | None = None  # mean of `recent`
    recent: list[float] = field(default_factory=list)  # losses of the last steps since a validation
    seconds: float = 0.0  # in all, validation included
    validation_seconds: float = 0.0
    stopped: int | None = None  # steps done when the user ended the training

    @classmethod
    def of(cls, draft: Draft) -> TrainingRecord:
        """Return the record of a draft's last commit, or a new record if there is none."""
        return cls(**draft.notes)

    def validated(self, step: int) -> bool:
        return bool(self.history) and self.history[-1]["step"] == step

    def add(self, step: int, loss: float, losses: dict[str, float]) -> bool:
        """Add a validation; return whether it is the best so far."""
        self.history.append({"step": step, **losses, "loss": self.loss})
        self.recent = []
        better = loss < self.best["loss"]
        if better:
            self.best = BestStep(step=step, loss=loss)
        self.worse = 0 if better else self.worse + 1
        return better

    def add_step(self, loss: float) -> None:
        self.recent = [*self.recent[-19:], loss]
        self.loss = sum(self.recent) / len(self.recent)

    @property
    def seconds_a_validation(self) -> float:
        return self.validation_seconds / max(1, len(self.history))


@dataclass
class Checkpoints:
    """Writes and reads the checkpoints of a training in its draft."""

    draft: Draft
    task: TrainingTask
    optimizer: torch.optim.Optimizer
    record: TrainingRecord

    def save(self, step: int, carried: dict[str, Tensor]) -> None:
        """Write a checkpoint next to the last one. Once committed, it is the one to resume from."""
        record = self.record
        folder = _empty_folder(self.draft.file(f"checkpoint-{step}"))
        save_tensors(self.task.model, folder / "model.safetensors")
        for name, tensors in (("optimizer", self._optimizer_tensors()), ("carried", carried)):
            with writing(folder / f"{name}.safetensors"):
                save_file(tensors, folder / f"{name}.safetensors")
        new = [folder]
        if record.best["step"] == step:
            new.append(_empty_folder(self.draft.file(self.best.name)))
            with writing(self.best):
                self.task.save(self.best)
        record.checkpoint = step
        self.draft.notes.update(asdict(record))
        kept = {folder, self.best}
        old = [path for kind in ("checkpoint-*", "best-*") for path in self.draft.folder.glob(kind) if path not in kept]
        self.draft.commit(*(path.name for path in new), without=[path.name for path in old])
        for path in old:
            disk.remove_tree(path)

    def restore(self, place: Path) -> None:
        """Load the last checkpoint from the folder of the draft that has it."""
        folder = place / f"checkpoint-{self.record.checkpoint}"
        if not folder.is_dir():
            raise TrainingError(f"{folder} is not there; a run directory must be on a disk that all processes share")
        try:
            load_tensors(self.task.model, folder / "model.safetensors")
            carried = load_file(folder / "carried.safetensors")
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in load_file(folder / "optimizer.safetensors").items():
                number, key = name.split(".", 1)
                state.setdefault(int(number), {})[key] = tensor
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        except (ModelError, OSError, SafetensorError, ValueError, KeyError) as error:
            raise TrainingError(
                f"the checkpoint {folder} cannot be read ({error}); delete {place} and run the same command again: "
                "this training starts over"
            ) from error
        self.task.carry(carried)

    @property
    def best(self) -> Path:
        return best_folder(self.draft, self.record)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        state: dict[int, dict[str, Any]] = self.optimizer.state_dict()["state"]
        return {
            f"{number}.{key}": value.contiguous()
            for number, entries in state.items()
            for key, value in entries.items()
            if value is not None
        }


def best_folder(draft: Draft, record: TrainingRecord) -> Path:
    return draft.folder / f"best-{record.best['step']}"


def _empty_folder(folder: Path) -> Path:
    disk.remove_tree(folder)
    disk.make_directory(folder)
    return folder
