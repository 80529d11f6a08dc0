"""Training a base model on its corpus, from scratch or from a pretrained model.

If the LM reads on from document to document, the data is one long text, in blocks, or in lanes for a model with memory.
Otherwise every document is read separately.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnlm.artifact import Artifact
from gnnlm.config import FitConfig, LMConfig, LMTrainConfig
from gnnlm.corpus.stream import Stream
from gnnlm.corpus.vocabulary import ByteVocabulary, Vocabulary
from gnnlm.lm.native_lm import NativeLM, NativeModel
from gnnlm.lm.transformer_xl import TransformerXL
from gnnlm.predict.predictor import perplexity
from gnnlm.train.batches import IGNORED, Lanes, StartToken, TextBlocks, TextPieces, Tokens
from gnnlm.train.first_readings import FirstReadings
from gnnlm.train.schedule import TrainingPlan
from gnnlm.train.training_loop import TrainingSetup, decayed, finish, fit
from gnnlm.train.training_task import Report, TrainingTask, Validation

Batches = TextBlocks | Lanes | TextPieces


@dataclass(frozen=True)
class ValidText:
    """The held-out text, in batches: how many, and how many tokens they have."""

    batches: Batches
    count: int
    tokens: int


class LossFunction(Protocol):
    """A function that computes the losses of a kind of model."""

    def __call__(self, model: nn.Module, read: Tensor, wanted: Tensor, past: Any) -> tuple[Tensor, Any]:
        """Return negative log-probabilities of the wanted tokens, [N], and what the next segment needs."""
        ...


def native_losses(model: nn.Module, read: Tensor, wanted: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Compute the losses of native models; see `LossFunction`."""
    out = model(read, past)
    real = wanted != IGNORED
    head: Any = model.head
    return -head.target_log_probs(out.states[real], wanted[real]), out.past


def hf_losses(model: nn.Module, read: Tensor, wanted: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Compute the losses of transformers models; see `LossFunction`."""
    logits = model(input_ids=read, use_cache=False).logits
    real = wanted != IGNORED
    return F.cross_entropy(logits[real].float(), wanted[real], reduction="none"), None


@dataclass
class LMTask(TrainingTask):
    """Next-token prediction; a model with memory carries `past` from segment to segment."""

    model: nn.Module
    batches: Batches
    valid: ValidText
    losses: LossFunction
    accumulate: int
    save_to: Callable[[Path], None]
    bits: bool = False  # report bits per byte, not perplexity
    readings: FirstReadings | None = None  # keeps the states of batches that are read for the first time
    past: Any = field(default=None, init=False)

    def tokens(self, step: int) -> int:
        return sum(self.batches.wanted(step * self.accumulate + part) for part in range(self.accumulate))

    def loss(self, step: int, part: int) -> Tensor:
        number = step * self.accumulate + part
        whole = self.batches(number)
        share = self.processes.share_of(len(whole[0]))
        read, wanted = (tensor[share].to(self.device) for tensor in whole)
        past = self.past if isinstance(self.batches, Lanes) and not self.batches.begins(number) else None
        with nullcontext() if self.readings is None else self.readings.reading(number, read):
            if not len(read):  # there are more processes than lines
                return torch.zeros((), device=self.device)
            losses, self.past = self.losses(self.model, read, wanted, past)
        if not isinstance(self.batches, Lanes):
            self.past = None
        return losses.sum()

    def step_done(self) -> None:
        if self.readings is not None:
            self.readings.keep(self.processes)

    def validate(self, step: int, report: Report) -> Validation:
        total, count, past = 0.0, 0, None
        batches = self.valid.batches
        for number in range(self.valid.count):
            read, wanted = (tensor.to(self.device) for tensor in batches(number))
            losses, past = self.losses(self.model, read, wanted, past)
            past = past if isinstance(batches, Lanes) else None
            total += losses.sum().item()
            count += len(losses)
            report(count, self.valid.tokens)
        loss = total / count
        bits = f"valid {loss / math.log(2):.4f} bits per byte"
        words = bits if self.bits else f"valid perplexity {perplexity(loss):.3f}"
        return Validation(loss, {"valid_base": loss}, words)

    def save(self, folder: Path) -> None:
        self.save_to(folder)

    def carried(self) -> dict[str, Tensor]:
        if self.readings is not None and self.processes.first:
            return {"readings": self.readings.kept()}
        if not isinstance(self.batches, Lanes):
            return {}
        lanes, past = self.batches.lanes, self.past or []
        return {f"past.{n}": self.processes.join_lines(t.contiguous(), lanes) for n, t in enumerate(past)}

    def carry(self, tensors: dict[str, Tensor]) -> None:
        if (kept := tensors.pop("readings", None)) is not None and self.readings is not None and self.processes.first:
            self.readings.check(kept)
        mine = [tensors[f"past.{n}"] for n in range(len(tensors))]
        self.past = [t[self.processes.share_of(len(t))].to(self.device) for t in mine] or None


def documents(stream: Stream, leave_out: set[int] | None = None) -> Tokens:
    """Return where the tokens of each document begin and end, [documents, 2], without the documents to leave out."""
    bounds: Tokens = np.stack([stream.starts[:-1], stream.starts[1:] - 1], axis=1)
    return np.delete(bounds, sorted(leave_out or ()), axis=0)


def text_batches(text: Tokens, start: int, config: FitConfig, segment: int | None, seed: int) -> Batches:
    """Cut one long text to train on: into lanes of segments for a model with memory, otherwise into blocks."""
    if segment is not None:
        segment = min(segment, len(text))
        return Lanes(text, start, segment, max(1, min(config.batch_tokens, len(text)) // segment))
    return TextBlocks(text, start, config.block, max(1, config.batch_tokens // config.block), seed)


def valid_text(
    stream: Stream, start: StartToken, config: FitConfig, continuous: bool = False, segment: int | None = None
) -> ValidText:
    """Return the first valid tokens, document by document, or as one text if `continuous`.

    `segment` is the length of the segments of a model with memory, which reads one text in any case.
    """
    if segment is not None:
        text = stream.text()[: config.valid_tokens]
        lanes = Lanes(text, start.token, min(segment, len(text)), 1)
        return ValidText(lanes, len(lanes), len(lanes) * lanes.segment)
    if continuous:
        text = stream.text()
        bounds = np.array([[0, min(len(text), config.valid_tokens)]])
    else:
        text, bounds = stream.tokens, documents(stream)
        before = np.cumsum(bounds[:, 1] - bounds[:, 0]) - (bounds[:, 1] - bounds[:, 0])
        bounds = bounds[before < config.valid_tokens]
    pieces = TextPieces(text, bounds, start, config.block, config.batch_tokens, seed=0)
    return ValidText(pieces, pieces.batches_in(0), pieces.tokens)


def native_optimizer(model: NativeModel, config: LMTrainConfig) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "nesterov":
        groups = decayed(trained, config.weight_decay)
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=True)
    return adam(trained, config)


def adam(trained: list[nn.Parameter], config: FitConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decayed(trained, config.weight_decay), lr=config.lr, betas=config.betas)


def train_native(
    setup: TrainingSetup, model: NativeModel, vocabulary: Vocabulary, streams: dict[str, Stream], lm: LMConfig
) -> Artifact:
    """Train a native model on its corpus; the artifact is a directory that `load_lm` reads."""
    config, start, stream = lm.train, StartToken(vocabulary.start), streams["train"]
    segment = model.options.segment if isinstance(model, TransformerXL) and lm.continuous else None
    batches: Batches
    if lm.continuous:
        batches = text_batches(stream.text(), start.token, config, segment, setup.seed)
    else:
        bounds = documents(stream)
        batches = TextPieces(stream.tokens, bounds, start, config.block, config.batch_tokens, setup.seed)

    def save(folder: Path) -> None:
        NativeLM(copy.deepcopy(model), vocabulary).save(folder)

    task = LMTask(
        model=model,
        batches=batches,
        valid=valid_text(streams["valid"], start, config, lm.continuous, segment),
        losses=native_losses,
        accumulate=config.accumulate,
        save_to=save,
        bits=isinstance(vocabulary, ByteVocabulary),
    )
    plan = TrainingPlan(
        config=config,
        steps=config.steps,
        schedule=config.schedule,
        tokens=config.batch_tokens * config.accumulate,
        label="lm",
        section="lm.train",
    )
    record = fit(setup, task, native_optimizer(model, config), plan)
    return finish(setup, task, plan, record, {"kind": "scratch"})
