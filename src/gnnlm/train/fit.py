"""The one training loop: for the graph network, for base models, for fine-tuning.

Every step is a function of (seed, step, weights, optimizer state, what the task carries): data order and dropout are
seeded by the step, the schedule is a formula. A checkpoint is therefore these tensors and a step number, and a run
that was killed ends in the same weights as one that was not.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gnnlm.artifact import Draft, writing
from gnnlm.config import FitConfig, TrainConfig
from gnnlm.errors import TrainingError
from gnnlm.lm.tensors import load_tensors, save_tensors
from gnnlm.progress import Track, say

Log = Callable[[str, float, int], None]
CHECKPOINT_SECONDS = 600.0  # no more than this is lost where validations are far apart


@dataclass(frozen=True)
class Plan:
    """How long, how fast, and how often one looks."""

    steps: int
    lr: float
    warmup: int
    schedule: str
    clip: float
    validate_every: int
    patience: int
    precision: str
    accumulate: int = 1
    label: str = "train"
    section: str = "train"  # of the config, for advice

    def learning_rate(self, step: int) -> float:
        """The rate of a step (from 0): linear warm-up, then the chosen decay.

        >>> plan = Plan(6, 1.0, 2, "linear", 1.0, 1, 1, "fp32")
        >>> [round(plan.learning_rate(step), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "inverse-sqrt":
            return self.lr * math.sqrt(max(1, self.warmup) / (step + 1))
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (1 - done if self.schedule == "linear" else 1.0)


def plan_of(config: FitConfig | TrainConfig, steps: int, label: str, section: str) -> Plan:
    """The plan that a section of the config makes."""
    return Plan(
        steps,
        config.lr,
        config.warmup,
        config.schedule,
        config.clip,
        config.validate_every,
        config.patience,
        config.precision,
        config.accumulate,
        label,
        section,
    )


@dataclass(frozen=True)
class Validation:
    """The loss that is to fall, what goes into the history with it, and words for people."""

    loss: float
    history: dict[str, float]
    words: str


class Task(Protocol):
    """What is trained, on what."""

    @property
    def model(self) -> nn.Module: ...

    def start(self, device: torch.device) -> None:
        """Take everything that is not the model to the device."""

    def loss(self, model: nn.Module, step: int, part: int) -> Tensor:
        """The mean loss of a part of a step's batch, through `model`."""
        ...

    def validate(self, step: int) -> Validation: ...

    def note(self, step: int) -> str:
        """A word on the step, for the progress line."""
        ...

    def save(self, path: Path) -> None:
        """Write what is kept of the best step, in a folder of its own."""

    def carried(self) -> dict[str, Tensor]:
        """Tensors beside the weights that the next step depends on."""
        ...

    def carry(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `carried` gave."""


@dataclass
class Trainer:
    """State of a training run that is not in the weights, and how it is kept."""

    draft: Draft
    task: Task
    optimizer: torch.optim.Optimizer

    @property
    def notes(self) -> dict[str, Any]:
        return self.draft.notes

    def save(self, step: int) -> None:
        """Write a checkpoint beside the last one, then let it count."""
        folder = self.draft.file(f"checkpoint-{step}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with writing(folder):
            save_tensors(self.task.model, folder / "model.safetensors")
            save_file(self._optimizer_tensors(), folder / "optimizer.safetensors")
            save_file(self.task.carried(), folder / "carried.safetensors")
            if self.notes["best"]["step"] == step:
                best = self.draft.file(f"best-{step}")
                shutil.rmtree(best, ignore_errors=True)
                best.mkdir()
                self.task.save(best)
        self.notes["checkpoint"] = step
        self.draft.commit()
        for pattern, kept in (("checkpoint-*", folder), ("best-*", self.best)):
            for old in self.draft.folder.glob(pattern):
                if old != kept:
                    shutil.rmtree(old)

    def restore(self) -> int:
        """Load the last checkpoint; the number of steps done."""
        step = int(self.notes["checkpoint"])
        folder = self.draft.folder / f"checkpoint-{step}"
        load_tensors(self.task.model, folder / "model.safetensors")
        self.task.carry(load_file(folder / "carried.safetensors"))
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in load_file(folder / "optimizer.safetensors").items():
            number, key = name.split(".", 1)
            state.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        return step

    @property
    def best(self) -> Path:
        return self.draft.folder / f"best-{self.notes['best']['step']}"

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{number}.{key}": value.contiguous()
            for number, entries in self.optimizer.state_dict()["state"].items()
            for key, value in entries.items()
            if value is not None
        }


def fit(
    draft: Draft,
    task: Task,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    tokens: int,
    seed: int,
    cpu: bool = False,
    log: Log = lambda name, value, step: None,
) -> Path:
    """Train, validate, keep the best; resumes from the draft's last checkpoint. The folder of the best step.

    `tokens` is about how many a step has, for the progress line.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=cpu)
    if accelerator.num_processes > 1:
        raise TrainingError(
            f"training runs in one process (got {accelerator.num_processes}); start it without a launcher"
        )
    device = accelerator.device
    task.start(device)
    trainer = Trainer(draft, task, optimizer)
    model, optimizer = accelerator.prepare(task.model, optimizer)
    notes = trainer.notes

    def diverged(what: str, step: int) -> TrainingError:
        kept, where = notes.get("checkpoint", 0), f"{task.note(max(0, step - 1))}, lr = {plan.lr:g}".lstrip(", ")
        return TrainingError(
            f"{what} at step {step} ({where}); lower {plan.section}.lr or {plan.section}.clip and train again with "
            f"--rebuild (the last good checkpoint is step {kept})"
        )

    def validate(step: int) -> None:
        task.model.eval()
        with torch.no_grad():
            found = task.validate(step)
        if not math.isfinite(found.loss):
            raise diverged(f"the validation loss is {found.loss}", step)
        notes["history"].append({"step": step, **found.history, "loss": notes["loss"]})
        better = found.loss < notes["best"]["loss"]
        notes["best"] = {"step": step, "loss": found.loss} if better else notes["best"]
        notes["worse"] = 0 if better else notes["worse"] + 1
        notes["seconds"] = seconds + track.seconds
        for name, value in found.history.items():
            log(name.replace("_", "/", 1), value, step)
        say(f"{plan.label}: step {step}/{plan.steps}, {found.words}"
            + ("" if better else f", best was step {notes['best']['step']}"))  # fmt: skip
        trainer.save(step)

    start, saved = 0, 0.0
    seconds = float(notes.get("seconds", 0.0))
    if draft.resumed:
        start = trainer.restore()
        say(f"{plan.label}: going on from step {start}")
    with Track(plan.label, plan.steps * tokens, "tokens", start * tokens) as track:
        if not draft.resumed:
            notes.update(history=[], best={"step": 0, "loss": math.inf}, worse=0, loss=None, seconds=0.0)
            validate(0)
        recent: list[float] = notes.get("recent", [])
        for step in range(start, plan.steps):
            if notes["worse"] >= plan.patience:
                say(f"{plan.label}: stopped early, no better validation in {plan.patience}")
                break
            torch.manual_seed(seed * 1_000_003 + step)
            model.train()
            value = 0.0
            for part in range(plan.accumulate):
                with torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bf16"):
                    loss = task.loss(model, step, part)
                value += loss.item() / plan.accumulate
                if not math.isfinite(value):
                    raise diverged(f"the loss is {value}", step + 1)
                accelerator.backward(loss / plan.accumulate)
            norm = accelerator.clip_grad_norm_(task.model.parameters(), plan.clip)
            rate = plan.learning_rate(step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            recent = [*recent[-19:], value]
            notes["loss"] = sum(recent) / len(recent)
            for name, number in (("loss", value), ("gradient_norm", float(norm)), ("learning_rate", rate)):
                log(f"train/{name}", number, step + 1)
            track.advance(tokens, note=f"loss {notes['loss']:.3f} {task.note(step)}".rstrip())
            if (step + 1) % plan.validate_every == 0 or step + 1 == plan.steps:
                recent = notes["recent"] = []
                validate(step + 1)
                saved = track.seconds
            elif track.seconds - saved > CHECKPOINT_SECONDS:
                notes.update(recent=recent, seconds=seconds + track.seconds)
                trainer.save(step + 1)
                saved = track.seconds
    return trainer.best


def decayed(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices decay, vectors do not."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def fit_facts(draft: Draft, plan: Plan, model: nn.Module) -> dict[str, Any]:
    """What a finished training tells of itself."""
    notes = draft.notes
    return {
        "best_step": notes["best"]["step"],
        "best_valid_loss": notes["best"]["loss"],
        "steps_planned": plan.steps,
        "steps_done": notes["history"][-1]["step"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": notes["seconds"],
    }
