"""The one training loop: for the graph network, for base models, for fine-tuning.

Every step is a function of the seed, its number, the weights, the optimizer's state and what the task carries: the step
seeds data order and dropout, and the schedule is a formula. So a checkpoint is these tensors and a step number, and an
interrupted training ends with the same weights as an uninterrupted one.

Several processes (`processes.py`) go through this loop together. Each reads its lines of every batch and makes the same
update; only the first validates, writes files and prints.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnnlm.artifact import Artifact, Draft, disk
from gnnlm.errors import Interrupted, TrainingError
from gnnlm.progress import Track, clock, say, warn
from gnnlm.stage import BuildContext
from gnnlm.train.checkpoints import Checkpoints, TrainingRecord, best_folder
from gnnlm.train.processes import Processes, here
from gnnlm.train.schedule import TrainingPlan
from gnnlm.train.signals import SignalDelay
from gnnlm.train.training_task import Log, TrainingTask, Validation

CHECKPOINT_SECONDS = 600.0  # a crash loses no more work than this, however far apart validations are


@dataclass(frozen=True)
class TrainingSetup:
    """Where a training is stored, and how it runs and stops.

    If a file appears at `stop_file`, training ends after the current step and keeps the best step so far. With
    `finish`, an interrupted training ends without another step.
    """

    draft: Draft
    seed: int
    cpu: bool = False
    log: Log = lambda name, value, step: None
    stop_file: Path | None = None
    finish: bool = False
    processes: Processes = field(default_factory=here)


def training_setup(context: BuildContext, draft: Draft, log: Log, device: str) -> TrainingSetup:
    """Return the setup of a stage that trains."""
    return TrainingSetup(
        draft,
        context.config.seed,
        cpu=device == "cpu",
        log=log,
        stop_file=context.snapshot.root / "stop",
        finish=context.finish_training,
    )


def fit(
    setup: TrainingSetup, task: TrainingTask, optimizer: torch.optim.Optimizer, plan: TrainingPlan
) -> TrainingRecord:
    """Train, validate and keep the best step, resuming from the draft's last checkpoint."""
    record = TrainingRecord.of(setup.draft)
    if setup.finish:
        if not setup.draft.resumed:
            raise TrainingError("there is no half-done training to finish; train first, without --finish")
        record.stopped = record.checkpoint
    else:
        _TrainingLoop(setup, task, optimizer, plan, record).run()
    if record.stopped is not None:
        best = record.best["step"]
        done = f"stopped at step {record.stopped} of {plan.steps}, as you asked"
        say(f"{plan.label}: {done}; keeping step {best}, the best so far")
        if best == 0:
            warn(f"{plan.label}: no validated step was better than the untrained model, so the untrained model is kept")
    return record


def finish(
    setup: TrainingSetup,
    task: TrainingTask,
    plan: TrainingPlan,
    record: TrainingRecord,
    facts: Mapping[str, Any] | None = None,
    beside: Sequence[str] = (),
) -> Artifact:
    """Make the best step's files the artifact, with other files of the draft `beside` them.

    Only the first process writes it.
    """
    draft = setup.draft
    if not setup.processes.first:
        return draft.finish({}, files=())
    best = best_folder(draft, record)
    names = [path.name for path in sorted(best.iterdir())]
    for name in names:
        disk.copy(best / name, draft.file(name))
    draft.write_text("history.json", json.dumps(record.history, indent=1))
    all_facts = {
        "best_step": record.best["step"],
        "best_valid_loss": record.best["loss"],
        "steps_planned": plan.steps,
        "steps_done": record.checkpoint,
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "seconds": record.seconds,
        "validation_seconds": record.validation_seconds,
    }
    if record.stopped is not None:
        all_facts["stopped_by_user_at"] = record.stopped
    return draft.finish({**all_facts, **(facts or {})}, files=(*names, "history.json", *beside))


class _SignalPending(Exception):
    """Ends a validation early because a signal is pending."""


class _TrainingLoop:
    """One attempt at a training, from its last checkpoint to its end or to an interruption."""

    def __init__(
        self,
        setup: TrainingSetup,
        task: TrainingTask,
        optimizer: torch.optim.Optimizer,
        plan: TrainingPlan,
        record: TrainingRecord,
    ) -> None:
        self.setup, self.task, self.optimizer, self.plan, self.record = setup, task, optimizer, plan, record
        self.processes = setup.processes
        self.device = _device(setup.cpu)
        task.start(self.device, self.processes)
        task.model.to(self.device)
        self.trained = [p for p in task.model.parameters() if p.requires_grad]
        self.checkpoints = Checkpoints(setup.draft, task, optimizer, record)
        self.signals = SignalDelay(quiet=not self.processes.first)

    def run(self) -> None:
        plan, record = self.plan, self.record
        start = self._begin()
        self._announce_stop_file()
        with self.signals, Track(plan.label, plan.steps * plan.tokens, "tokens", start * plan.tokens) as self.track:
            self.began, self.seconds_before = time.monotonic(), record.seconds
            self.track.later = plan.validations_left(start) * record.seconds_a_validation
            saved = 0.0
            if plan.validates_after(start) and not record.validated(start):
                self._validate(start)
            for step in range(start, plan.steps):
                if record.worse >= plan.config.patience:
                    say(f"{plan.label}: stopped early, {record.worse} validations in a row without a better one")
                    break
                self._step(step)
                validates = plan.validates_after(step + 1)
                if validates:
                    self._validate(step + 1)
                late = not validates and self.track.seconds - saved > CHECKPOINT_SECONDS
                flags = late, self.signals.pending is not None, self._stop_requested()
                _, (late, signalled, stopped) = self.processes.agree(flags=flags)
                if late:
                    self._save(step + 1)
                if late or validates:
                    saved = self.track.seconds
                if signalled:
                    self._obey_signals(step + 1)
                if stopped:
                    record.stopped = step + 1
                    self._save(step + 1)
                    break
            self.track.advance(0, note=f"plus {clock(record.validation_seconds)} of validation")

    def _begin(self) -> int:
        """Give all processes the weights and the record of the last checkpoint, if any; return the steps done."""
        self.processes.agree()  # every process has its model and its text
        draft, record = self.setup.draft, self.record
        folder, known = self.processes.tell((draft.folder if draft.resumed else None, asdict(record)))
        for name, value in known.items():
            setattr(record, name, value)
        record.stopped = None
        if folder is not None:
            self.checkpoints.restore(folder)
            say(f"{self.plan.label}: resuming from step {record.checkpoint}")
        self.processes.agree()  # every process has found the checkpoint
        self.processes.equalize(self.task.model)
        return record.checkpoint if folder is not None else 0

    def _step(self, step: int) -> None:
        config, task = self.plan.config, self.task
        torch.manual_seed(self.setup.seed * 1_000_003 + step + (self.processes.rank << 40))
        task.model.train()
        tokens = task.tokens(step)
        value = 0.0
        for part in range(config.accumulate):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                loss = task.loss(step, part) / tokens
            value += loss.item()
            if loss.requires_grad:
                loss.backward()
        value, _ = self.processes.agree(value)
        if not math.isfinite(value):
            raise self._diverged(f"the loss is {value}", step + 1)
        self.processes.sum_gradients(self.trained)
        norm = nn.utils.clip_grad_norm_(self.trained, config.clip)
        rate = self.plan.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        task.step_done()
        self.record.add_step(value)
        for name, number in (("loss", value), ("gradient_norm", float(norm)), ("learning_rate", rate)):
            self.setup.log(f"train/{name}", number, step + 1)
        self.track.advance(self.plan.tokens, note=f"loss {self.record.loss:.3f} {task.note(step)}".rstrip())

    def _validate(self, step: int) -> None:
        """Validate, record the result and save. If a signal comes, the next attempt repeats the validation."""
        plan, record = self.plan, self.record
        began = time.monotonic()
        found = self._validation(step) if self.processes.first else Validation(0.0, {}, "")
        loss, (interrupted,) = self.processes.agree(found.loss if found else 0.0, (found is None,))
        if interrupted or found is None:
            self._obey_signals(step)
            return self._validate(step)  # the signal's handler chose to continue training
        if not math.isfinite(loss):
            raise self._diverged(f"the validation loss is {loss}", step)
        better = record.add(step, loss, found.history)
        record.validation_seconds += time.monotonic() - began
        self.track.later = plan.validations_left(step) * record.seconds_a_validation
        for name, value in found.history.items():
            self.setup.log(name.replace("_", "/", 1), value, step)
        worse = "" if better else f", best was step {record.best['step']}"
        say(f"{plan.label}: step {step}/{plan.steps}, {found.words}{worse}")
        self._save(step)

    def _validation(self, step: int) -> Validation | None:
        """Return the losses on held-out text; None if a signal came."""
        self.task.model.eval()
        with self.track.paused(), Track(f"{self.plan.label}, validation", 0, "tokens", brief=True) as track:

            def report(done: int, total: int) -> None:
                if self.signals.pending is not None:
                    raise _SignalPending
                track.total = total
                track.advance(done - track.done)

            try:
                with torch.no_grad():
                    found = self.task.validate(step, report)
                    return Validation(found.loss, {**found.history, **self.task.train_losses()}, found.words)
            except _SignalPending:
                return None

    def _save(self, step: int) -> None:
        self.record.seconds = self.seconds_before + time.monotonic() - self.began
        carried = self.task.carried()
        if self.processes.first:
            self.checkpoints.save(step, carried)
        else:
            self.record.checkpoint = step

    def _obey_signals(self, step: int) -> None:
        """Save the step and deliver the signal; a process without a signal ends with the one that got it."""
        if self.record.history:  # before the first validation there is nothing to save
            if self.record.checkpoint != step:
                self._save(step)
            say(f"{self.plan.label}: step {step} is saved; the same command resumes from there")
        if self.signals.pending is None:
            raise Interrupted
        self.signals.release()

    def _announce_stop_file(self) -> None:
        file = self.setup.stop_file
        if file is not None and self.processes.first:
            disk.remove_file(file)  # left over from another training
            say(f"{self.plan.label}: to stop early with the best step so far, create the file {file}")

    def _stop_requested(self) -> bool:
        file = self.setup.stop_file
        if file is None or not self.processes.first or not file.exists():
            return False
        disk.remove_file(file)
        return True

    def _diverged(self, what: str, step: int) -> TrainingError:
        plan = self.plan
        where = f"{self.task.note(max(0, step - 1))}, lr = {plan.config.lr:g}".lstrip(", ")
        return TrainingError(
            f"{what} at step {step} ({where}); lower {plan.section}.lr or {plan.section}.clip and train again with "
            f"--rebuild (the last good checkpoint is step {self.record.checkpoint})"
        )


def _device(cpu: bool) -> torch.device:
    """Return the accelerator of this process, or the CPU if there is none or `cpu` is set."""
    found = None if cpu or not torch.accelerator.is_available() else torch.accelerator.current_accelerator()
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def decayed(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for an optimizer: matrices decay, vectors do not."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
