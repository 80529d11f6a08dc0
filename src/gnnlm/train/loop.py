"""Training the graph network in front of a frozen softmax; the base model is not even loaded.

Every step is a function of (seed, step, weights, optimizer state): data order and dropout are seeded by the
step, the schedule is a formula. A checkpoint is therefore weights, optimizer state and a step number, and a
run that was killed ends in the same weights as one that was not.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnnlm.artifact import Artifact, Draft, writing
from gnnlm.config import TrainConfig
from gnnlm.errors import TrainingError
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.assemble import Assembler
from gnnlm.lm.head import Head
from gnnlm.predict.predictor import perplexity
from gnnlm.progress import Track, say
from gnnlm.train.data import BlockOrder

VALIDATION_BLOCK = 256


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """The rate of a step (from 0): linear warm-up, then the chosen decay.

    >>> config = TrainConfig(lr=1.0, warmup=2, schedule="linear")
    >>> [round(learning_rate(config, step, 6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, total - config.warmup)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (1 - done if config.schedule == "linear" else 1.0)


def make_optimizer(model: GnnModel, config: TrainConfig) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.optimizer == "adam":
        return torch.optim.Adam(trained, lr=config.lr, betas=config.betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


@torch.no_grad()
def validation_loss(
    model: GnnModel, head: Head, valid: Assembler, k: int, tokens: int, device: torch.device
) -> tuple[float, float]:
    """Mean negative log-probability on the first valid positions, of the base model and of the GNN."""
    model.eval()
    sums, count, carry = [0.0, 0.0], 0, None
    for positions in torch.arange(min(tokens, len(valid.queries))).split(VALIDATION_BLOCK):
        graph = valid(positions[None], k).to(device)
        gnn_BTD, carry = model(graph, carry)
        targets = valid.queries.tokens_P[positions].to(device)
        real = targets >= 0
        for i, states in enumerate((graph.context_BTD[0], gnn_BTD[0])):
            sums[i] -= head.target_log_probs(states[real].float(), targets[real]).sum().item()
        count += int(real.sum())
    return sums[0] / count, sums[1] / count


@dataclass
class Trainer:
    """State of a training run that is not in the weights, and how it is kept."""

    draft: Draft
    model: GnnModel
    optimizer: torch.optim.Optimizer

    @property
    def notes(self) -> dict[str, Any]:
        return self.draft.notes

    def save(self, step: int) -> None:
        """Write a checkpoint beside the last one, then let it count."""
        folder = self.draft.folder / f"checkpoint-{step}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with writing(folder):
            self.model.save(folder / "model.safetensors")
            save_file(self._optimizer_tensors(), folder / "optimizer.safetensors")
            if self.notes["best"]["step"] == step:
                self.model.save(self.draft.folder / f"best-{step}.safetensors")
        self.notes["checkpoint"] = step
        self.draft.commit()
        for old in self.draft.folder.glob("checkpoint-*"):
            if old != folder:
                shutil.rmtree(old)
        for old in self.draft.folder.glob("best-*.safetensors"):
            if old != self.best_file:
                old.unlink()

    def restore(self) -> int:
        """Load the last checkpoint; the number of steps done."""
        step = int(self.notes["checkpoint"])
        folder = self.draft.folder / f"checkpoint-{step}"
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        tensors = load_file(folder / "optimizer.safetensors")
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            number, key = name.split(".", 1)
            state.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        return step

    @property
    def best_file(self) -> Path:
        return self.draft.folder / f"best-{self.notes['best']['step']}.safetensors"

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{number}.{key}": value.contiguous()
            for number, entries in self.optimizer.state_dict()["state"].items()
            for key, value in entries.items()
        }


def train_gnn(
    draft: Draft,
    model: GnnModel,
    head: Head,
    train: Assembler,
    valid: Assembler,
    config: TrainConfig,
    seed: int,
    log: Callable[[str, float, int], None] = lambda name, value, step: None,
) -> Artifact:
    """Train, validate, keep the best; resumes from the draft's last checkpoint."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=config.device == "cpu")
    device = accelerator.device
    if accelerator.num_processes > 1:
        raise TrainingError(
            f"training runs in one process (got {accelerator.num_processes}); start it without a launcher"
        )
    head = head.on(device)
    trainer = Trainer(draft, model, make_optimizer(model, config))
    trained, optimizer = accelerator.prepare(model, trainer.optimizer)
    phases = [phase.k for phase in config.curriculum for _ in range(phase.steps)]
    total = len(phases)
    order = BlockOrder(len(train.queries), config.block, config.batch_blocks, seed)
    tokens = config.block * config.batch_blocks

    def diverged(what: str, step: int) -> TrainingError:
        k, kept = phases[max(0, step - 1)], trainer.notes.get("checkpoint", 0)
        return TrainingError(
            f"{what} at step {step} (k = {k}, lr = {config.lr:g}); lower train.lr or train.clip and train again with "
            f"--rebuild (the last good checkpoint is step {kept})"
        )

    def validate(step: int) -> None:
        base, gnn = validation_loss(model, head, valid, phases[-1], config.valid_tokens, device)
        notes = trainer.notes
        if not math.isfinite(gnn):
            raise diverged(f"the validation loss is {gnn}", step)
        notes["history"].append({"step": step, "valid_base": base, "valid_gnn": gnn, "loss": notes["loss"]})
        better = gnn < notes["best"]["loss"]
        notes["best"] = {"step": step, "loss": gnn} if better else notes["best"]
        notes["worse"] = 0 if better else notes["worse"] + 1
        notes["seconds"] = seconds + track.seconds
        log("valid/perplexity", perplexity(gnn), step)
        say(f"train: step {step}/{total}, valid perplexity {perplexity(gnn):.3f} (base {perplexity(base):.3f})"
            + ("" if better else f", best was step {notes['best']['step']}"))  # fmt: skip
        trainer.save(step)

    start = 0
    seconds = float(trainer.notes.get("seconds", 0.0))
    if draft.resumed:
        start = trainer.restore()
        say(f"train: going on from step {start}")
    with Track("train", total * tokens, "tokens", start * tokens) as track:
        if not draft.resumed:
            trainer.notes.update(history=[], best={"step": 0, "loss": math.inf}, worse=0, loss=None, seconds=0.0)
            validate(0)
        recent: list[float] = []
        for step in range(start, total):
            if trainer.notes["worse"] >= config.patience:
                say(f"train: stopped early, no better validation in {config.patience}")
                break
            torch.manual_seed(seed * 1_000_003 + step)
            positions_BT = order(step)
            graph = train(positions_BT, phases[step]).to(device)
            targets = train.queries.tokens_P[positions_BT].to(device)
            trained.train()
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                states_BTD, _ = trained(graph)
            real = targets >= 0
            loss = -head.target_log_probs(states_BTD[real].float(), targets[real]).mean()
            value = loss.item()
            if not math.isfinite(value):
                raise diverged(f"the loss is {value}", step + 1)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), config.clip)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step, total)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            recent = [*recent[-19:], value]
            trainer.notes["loss"] = sum(recent) / len(recent)
            log("train/loss", value, step + 1)
            log("train/gradient_norm", float(norm), step + 1)
            log("train/learning_rate", learning_rate(config, step, total), step + 1)
            track.advance(tokens, note=f"loss {trainer.notes['loss']:.3f} k {phases[step]}")
            if (step + 1) % config.validate_every == 0 or step + 1 == total:
                recent = []  # a mean that a resumed run can have too
                validate(step + 1)
    return _finish(trainer, total)


def _finish(trainer: Trainer, total: int) -> Artifact:
    notes = trainer.notes
    shutil.copyfile(trainer.best_file, trainer.draft.folder / "model.safetensors")
    trainer.draft.write_text("history.json", json.dumps(notes["history"], indent=1))
    facts = {
        "best_step": notes["best"]["step"],
        "best_valid_loss": notes["best"]["loss"],
        "steps_planned": total,
        "steps_done": notes["history"][-1]["step"],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "seconds": notes["seconds"],
    }
    return trainer.draft.finish(facts, files=("model.safetensors", "history.json"))
