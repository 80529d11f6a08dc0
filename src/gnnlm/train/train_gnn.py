"""Training the graph network in front of a frozen softmax, without loading the base model."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact
from gnnlm.config import Phase, TrainConfig
from gnnlm.gnn.model import GnnModel
from gnnlm.graph.batch import Graph
from gnnlm.lm.head import Head
from gnnlm.predict.bootstrap import Floats, change_interval
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.predictor import Predictor, perplexity
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.train.batches import BlockOrder
from gnnlm.train.processes import ALONE, Processes
from gnnlm.train.schedule import TrainingPlan
from gnnlm.train.training_loop import TrainingSetup, decayed, finish, fit
from gnnlm.train.training_task import Report, TrainingTask, Validation

VALIDATION_BLOCK = 256
RESAMPLES = 400  # of the valid documents, for the interval of a validation's change
SAMPLE_TOKENS = 1024  # training tokens that are scored at each validation,
SAMPLE_SHARE = 0.08  # but at most this share of the valid tokens, which keeps the cost below a tenth


def make_optimizer(model: GnnModel, config: TrainConfig) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(trained, lr=config.lr, betas=config.betas)
    return torch.optim.AdamW(decayed(trained, config.weight_decay), lr=config.lr, betas=config.betas)


@dataclass(frozen=True)
class Curriculum:
    """The k of every step, computed from the phases, so that long curricula take no memory.

    >>> ks = Curriculum((Phase(k=32, steps=2), Phase(k=128, steps=1)))
    >>> [ks[step] for step in range(len(ks))], ks[-1]
    ([32, 32, 128], 128)
    """

    phases: tuple[Phase, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(phase.steps for phase in self.phases))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, step: int) -> int:
        if not -len(self) <= step < len(self):
            raise IndexError(step)
        return self.phases[bisect_right(self._ends, step % len(self))].k


@dataclass(frozen=True)
class TrainingTexts:
    """The text to train on, and the text to validate on.

    `places` are the train positions that may be read; by default those of the neighbour table.
    """

    train: SearchedText
    valid: SearchedText
    places: Tensor | None = None


@dataclass
class GnnTask(TrainingTask):
    """Blocks of train positions with their neighbours; k changes with the phase of the curriculum.

    `order` numbers the positions that may be read.
    """

    model: GnnModel
    head: Head
    graphs: GraphBuilder
    texts: TrainingTexts
    order: BlockOrder
    ks: Curriculum
    accumulate: int
    valid_tokens: int

    def start(self, device: torch.device, processes: Processes = ALONE) -> None:
        super().start(device, processes)
        self.head = self.head.on(device)

    def tokens(self, step: int) -> int:
        lines = (self.order(step * self.accumulate + part) for part in range(self.accumulate))
        return sum(int((self.texts.train.text.tokens(self._positions(some)) >= 0).sum()) for some in lines)

    def loss(self, step: int, part: int) -> Tensor:
        lines_BT = self.order(step * self.accumulate + part)
        mine = lines_BT[self.processes.share_of(len(lines_BT))]
        if not len(mine):  # there are more processes than blocks
            return torch.zeros((), device=self.device)
        graph, targets = self._batch(mine, self.ks[step])
        states_BTD, _ = self.model(graph)
        real = targets >= 0
        with torch.autocast(self.device.type, enabled=False):  # the softmax stays in full precision
            return -self.head.target_log_probs(states_BTD[real].float(), targets[real]).sum()

    def _batch(self, lines_BT: Tensor, k: int) -> tuple[Graph, Tensor]:
        """Return the graph and the targets of lines of a batch."""
        train, positions_BT = self.texts.train, self._positions(lines_BT)
        graph = self.graphs(train.context(positions_BT), train.table.at(positions_BT, k))
        return graph.to(self.device), train.text.tokens(positions_BT).to(self.device)

    def _positions(self, lines: Tensor) -> Tensor:
        places = self.texts.places
        return self.texts.train.table.positions(lines) if places is None else places[lines]

    def validate(self, step: int, report: Report) -> Validation:
        """Return the mean negative log-probability on the first valid positions, of the base model and of the GNN.

        If the positions are of more than one document, the history also gets the 95% interval of the change.
        """
        valid = self.texts.valid
        positions = torch.arange(min(self.valid_tokens, len(valid.text)))
        sums, gains = self._losses(valid, positions, VALIDATION_BLOCK, report)
        base, gnn = (sums[name] / sums["tokens"] for name in ("base", "gnn"))
        words = f"valid perplexity {perplexity(gnn):.3f} (base {perplexity(base):.3f})"
        document = valid.text.document_of(positions[valid.text.tokens(positions) >= 0]).numpy()
        losses = {"valid_base": base, "valid_gnn": gnn}
        interval = change_interval(gains, document, RESAMPLES, 0)
        if interval is not None and np.isfinite(interval).all():
            losses |= {"valid_change_low": interval[0], "valid_change_high": interval[1]}
        return Validation(gnn, losses, words)

    def train_losses(self) -> dict[str, float]:
        """Return the same two losses on blocks spread over the training text, each read without a carry."""
        total: Counter[str] = Counter()
        for lines_T in self._sample:
            total.update(self._losses(self.texts.train, self._positions(lines_T), len(lines_T))[0])
        return {f"train_{name}": total[name] / max(1, total["tokens"]) for name in ("base", "gnn")}

    def _losses(
        self, text: SearchedText, positions: Tensor, block: int, report: Report = lambda done, total: None
    ) -> tuple[dict[str, float], Floats]:
        """Return the summed losses of base model and GNN with the number of tokens, and the gain of each token."""
        predictor = Predictor(self.head, self.graphs, self.model, self.ks[-1], {})
        sums = {"base": 0.0, "gnn": 0.0, "tokens": 0.0}
        gains = []
        done = 0
        for positions_N, prediction in text.predictions(predictor, block, ("base", "gnn"), positions):
            targets_N = text.text.tokens(positions_N).to(self.device)
            real = targets_N >= 0
            found = prediction[real].lm_target_log_probs(targets_N[real])
            for name, values in found.items():
                sums[name] -= values.sum().item()
            gains.append((found["gnn"] - found["base"]).double().cpu())
            sums["tokens"] += int(real.sum())
            done += len(positions_N)
            report(done, len(positions))
        return sums, torch.cat(gains).numpy()

    @cached_property
    def _sample(self) -> Tensor:
        return sampled_lines(self.order, min(self.valid_tokens, len(self.texts.valid.text)))

    def note(self, step: int) -> str:
        return f"k {self.ks[step]}"

    def save(self, folder: Path) -> None:
        self.model.save(folder / "model.safetensors")


def sampled_lines(order: BlockOrder, scored: int) -> Tensor:
    """Return the lines of training text that are scored at each validation, [blocks, block].

    There are few beside the `scored` valid tokens, so that they add little time.
    """
    tokens = max(1, min(SAMPLE_TOKENS, int(SAMPLE_SHARE * scored), order.positions))
    block = min(order.block, tokens)
    starts = torch.linspace(0, order.positions - block, tokens // block).long()
    return starts[:, None] + torch.arange(block)


def block_order(config: TrainConfig, positions: int, seed: int) -> BlockOrder:
    return BlockOrder(positions, config.block, config.batch_blocks, seed)


def read_lines(order: BlockOrder, batches: int, scored: int) -> Tensor:
    """Return which positions a training of so many batches reads or scores, among those that it may read, [N]."""
    read_N = order.read(batches)
    read_N[sampled_lines(order, scored)] = True
    return read_N


def train_gnn(
    setup: TrainingSetup, model: GnnModel, head: Head, graphs: GraphBuilder, texts: TrainingTexts, config: TrainConfig
) -> Artifact:
    """Train on the positions with neighbours, validate, and keep the best step."""
    ks, places, queried = Curriculum(config.curriculum), texts.places, texts.train.table.queried
    order = block_order(config, len(texts.train.table if places is None else places), setup.seed)
    if places is not None and queried is not None and len(queried) < len(places):
        scored = min(config.valid_tokens, len(texts.valid.text))
        read_N = read_lines(order, len(ks) * config.accumulate, scored)
        assert bool(torch.isin(places[read_N], queried).all()), "a position without neighbours would be read"
    tokens = config.block * config.batch_blocks * config.accumulate
    plan = TrainingPlan(config=config, steps=len(ks), schedule=config.schedule, tokens=tokens)
    task = GnnTask(model, head, graphs, texts, order, ks, config.accumulate, config.valid_tokens)
    return finish(setup, task, plan, fit(setup, task, make_optimizer(model, config), plan))
