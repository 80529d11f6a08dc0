"""Training the graph network in front of a frozen softmax; the base model is not even loaded."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import TrainConfig
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.assemble import Assembler
from gnnlm.lm.head import Head
from gnnlm.predict.predictor import perplexity
from gnnlm.train.data import BlockOrder
from gnnlm.train.fit import Log, Validation, decayed, fit, fit_facts, plan_of

VALIDATION_BLOCK = 256


def make_optimizer(model: GnnModel, config: TrainConfig) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(trained, lr=config.lr, betas=config.betas)
    return torch.optim.AdamW(decayed(trained, config.weight_decay), lr=config.lr, betas=config.betas)


@dataclass
class GnnTask:
    """Blocks of train positions with their neighbours; k changes with the phase."""

    model: GnnModel
    head: Head
    train: Assembler
    valid: Assembler
    order: BlockOrder
    ks: list[int]
    accumulate: int
    valid_tokens: int

    def start(self, device: torch.device) -> None:
        self.device, self.head = device, self.head.on(device)

    def loss(self, model: nn.Module, step: int, part: int) -> Tensor:
        lines_BT = self.order(step * self.accumulate + part)
        graph = self.train(lines_BT, self.ks[step]).to(self.device)
        targets = self.train.queries.tokens_P[self.train.at(lines_BT)].to(self.device)
        states_BTD, _ = model(graph)
        real = targets >= 0
        with torch.autocast(self.device.type, enabled=False):  # the softmax stays in full precision
            return -self.head.target_log_probs(states_BTD[real].float(), targets[real]).mean()

    def validate(self, step: int) -> Validation:
        """Mean negative log-probability on the first valid positions, of the base model and of the GNN."""
        sums, count, carry = [0.0, 0.0], 0, None
        for positions in torch.arange(min(self.valid_tokens, len(self.valid.queries))).split(VALIDATION_BLOCK):
            graph = self.valid(positions[None], self.ks[-1]).to(self.device)
            gnn_BTD, carry = self.model(graph, carry)
            targets = self.valid.queries.tokens_P[positions].to(self.device)
            real = targets >= 0
            for i, states in enumerate((graph.context_BTD[0], gnn_BTD[0])):
                sums[i] -= self.head.target_log_probs(states[real].float(), targets[real]).sum().item()
            count += int(real.sum())
        base, gnn = sums[0] / count, sums[1] / count
        words = f"valid perplexity {perplexity(gnn):.3f} (base {perplexity(base):.3f})"
        return Validation(gnn, {"valid_base": base, "valid_gnn": gnn}, words)

    def note(self, step: int) -> str:
        return f"k {self.ks[step]}"

    def save(self, path: Path) -> None:
        self.model.save(path / "model.safetensors")

    def carried(self) -> dict[str, Tensor]:
        return {}

    def carry(self, tensors: dict[str, Tensor]) -> None:
        pass


def train_gnn(
    draft: Draft,
    model: GnnModel,
    head: Head,
    train: Assembler,
    valid: Assembler,
    config: TrainConfig,
    seed: int,
    log: Log = lambda name, value, step: None,
) -> Artifact:
    """Train on the positions that were looked up, validate, keep the best."""
    ks = [phase.k for phase in config.curriculum for _ in range(phase.steps)]
    plan = plan_of(config, len(ks), "train", "train")
    order = BlockOrder(len(train.ids), config.block, config.batch_blocks, seed)
    task = GnnTask(model, head, train, valid, order, ks, config.accumulate, config.valid_tokens)
    tokens = config.block * config.batch_blocks * config.accumulate
    best = fit(draft, task, make_optimizer(model, config), plan, tokens, seed, config.device == "cpu", log)
    shutil.copyfile(best / "model.safetensors", draft.file("model.safetensors"))
    draft.write_text("history.json", json.dumps(draft.notes["history"], indent=1))
    return draft.finish(fit_facts(draft, plan, model), files=("model.safetensors", "history.json"))
