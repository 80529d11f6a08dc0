"""Training a base model on its corpus, from scratch or from a pretrained one.

If the LM reads on from document to document, the data is one long text: in blocks, or in lanes for a model with
memory. Otherwise every document is read separately.
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
from gnnlm.train.processes import ALONE, Processes
from gnnlm.train.schedule import TrainingPlan
from gnnlm.train.training_loop import TrainingSetup, decayed, finish, fit
from gnnlm.train.training_task import Report, Validation

Batches = TextBlocks | Lanes | TextPieces


@dataclass(frozen=True)
class ValidText:
    """The held-out text: the number of batches, and the tokens in them."""

    batches: Batches
    count: int
    tokens: int


class LossFunction(Protocol):
    """Negative log-probabilities of the wanted tokens that are scored, [N], and what the next segment needs."""

    def __call__(self, model: nn.Module, read: Tensor, wanted: Tensor, past: Any) -> tuple[Tensor, Any]: ...


def native_losses(model: nn.Module, read: Tensor, wanted: Tensor, past: Any) -> tuple[Tensor, Any]:
    """The losses of native models."""
    out = model(read, past)
    real = wanted != IGNORED
    head: Any = model.head
    return -head.target_log_probs(out.states[real], wanted[real]), out.past


def hf_losses(model: nn.Module, read: Tensor, wanted: Tensor, past: Any) -> tuple[Tensor, Any]:
    """The losses of transformers models."""
    logits = model(input_ids=read, use_cache=False).logits
    real = wanted != IGNORED
    return F.cross_entropy(logits[real].float(), wanted[real], reduction="none"), None


@dataclass
class LMTask:
    """Next-token prediction."""

    model: nn.Module
    batches: Batches
    valid: ValidText
    losses: LossFunction
    accumulate: int
    save_to: Callable[[Path], None]
    bits: bool = False  # report bits per byte, not perplexity
    readings: FirstReadings | None = None  # keeps the states of batches that are read for the first time
    past: Any = field(default=None, init=False)
    processes: Processes = field(default=ALONE, init=False)

    def start(self, device: torch.device, processes: Processes = ALONE) -> None:
        self.device, self.processes = device, processes

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

    def keep(self) -> None:
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
        words = f"valid perplexity {perplexity(loss):.3f}"
        if self.bits:
            words = f"valid {loss / math.log(2):.4f} bits per byte"
        return Validation(loss, {"valid_base": loss}, words)

    def train_losses(self) -> dict[str, float]:
        return {}

    def note(self, step: int) -> str:
        return ""

    def save(self, path: Path) -> None:
        self.save_to(path)

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
    """Where each document's tokens begin and end, [documents, 2], without the documents to leave out."""
    bounds: Tokens = np.stack([stream.starts[:-1], stream.starts[1:] - 1], axis=1)
    return np.delete(bounds, sorted(leave_out or ()), axis=0)


def text_batches(text: Tokens, start: int, config: FitConfig, segment: int | None, seed: int) -> Batches:
    """One long text to train on: in lanes of segments for a model with memory, else in blocks."""
    if segment is not None:
        segment = min(segment, len(text))
        return Lanes(text, start, segment, max(1, min(config.batch_tokens, len(text)) // segment))
    return TextBlocks(text, start, config.block, max(1, config.batch_tokens // config.block), seed)


def valid_text(
    stream: Stream, start: StartToken, config: FitConfig, continuous: bool = False, segment: int | None = None
) -> ValidText:
    """The first valid tokens; as one text where it is `continuous`, in segments for a model with memory."""
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
    fitting: TrainingSetup, model: NativeModel, vocabulary: Vocabulary, streams: dict[str, Stream], lm: LMConfig
) -> Artifact:
    """Train a native model on its corpus; the artifact is a directory that `load_lm` reads."""
    config, start, stream = lm.train, StartToken(vocabulary.start), streams["train"]
    segment = model.options.segment if isinstance(model, TransformerXL) and lm.continuous else None
    batches: Batches
    if lm.continuous:
        batches = text_batches(stream.text(), start.token, config, segment, fitting.seed)
    else:
        bounds = documents(stream)
        batches = TextPieces(stream.tokens, bounds, start, config.block, config.batch_tokens, fitting.seed)

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
    return finish(fitting, fit(fitting, task, native_optimizer(model, config), plan), {"kind": "scratch"})
