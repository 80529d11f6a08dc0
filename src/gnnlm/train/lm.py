"""Training a base model on its corpus, from scratch or from a pretrained one.

The data is one long text in blocks, or in lanes for a model with memory, where the LM reads on from document to
document; else every document by itself.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import FitConfig, LMConfig, LMTrainConfig
from gnnlm.corpus.stream import Stream
from gnnlm.corpus.vocabulary import ByteVocabulary, Vocabulary
from gnnlm.lm.native import NativeLM, NativeModel
from gnnlm.lm.transformer_xl import TransformerXL
from gnnlm.predict.predictor import perplexity
from gnnlm.train.data import IGNORED, Lanes, Pieces, TextBlocks, Tokens
from gnnlm.train.fit import Log, Validation, decayed, fit, fit_facts, plan_of

Batches = TextBlocks | Lanes | Pieces


class Losses(Protocol):
    """Negative log-probabilities of the wanted tokens that count, [N], and what the next segment needs."""

    def __call__(self, model: nn.Module, read: Tensor, wanted: Tensor, past: Any) -> tuple[Tensor, Any]: ...


def native_losses(model: nn.Module, read: Tensor, wanted: Tensor, past: Any) -> tuple[Tensor, Any]:
    """For models of ours."""
    out = model(read, past)
    real = wanted != IGNORED
    head: Any = getattr(model, "module", model).head
    return -head.target_log_probs(out.states[real], wanted[real]), out.past


def hf_losses(model: nn.Module, read: Tensor, wanted: Tensor, past: Any) -> tuple[Tensor, Any]:
    """For transformers models."""
    logits = model(input_ids=read, use_cache=False).logits
    real = wanted != IGNORED
    return F.cross_entropy(logits[real].float(), wanted[real], reduction="none"), None


@dataclass
class LMTask:
    """Next-token prediction."""

    model: nn.Module
    batches: Batches
    valid: Batches
    losses: Losses
    accumulate: int
    valid_batches: int
    save_to: Callable[[Path], None]
    bits: bool = False  # people speak of bits per byte, not of perplexity
    around: Callable[[int], AbstractContextManager[None]] = lambda number: nullcontext()  # entered for each batch
    past: Any = field(default=None, init=False)

    def start(self, device: torch.device) -> None:
        self.device = device

    def loss(self, model: nn.Module, step: int, part: int) -> Tensor:
        number = step * self.accumulate + part
        read, wanted = (tensor.to(self.device) for tensor in self.batches(number))
        past = self.past if isinstance(self.batches, Lanes) and not self.batches.begins(number) else None
        with self.around(number):
            losses, self.past = self.losses(model, read, wanted, past)
        if not isinstance(self.batches, Lanes):
            self.past = None
        return losses.mean()

    def validate(self, step: int) -> Validation:
        total, count, past = 0.0, 0, None
        for number in range(self.valid_batches):
            read, wanted = (tensor.to(self.device) for tensor in self.valid(number))
            losses, past = self.losses(self.model, read, wanted, past)
            past = past if isinstance(self.valid, Lanes) else None
            total += losses.sum().item()
            count += len(losses)
        loss = total / count
        words = f"valid perplexity {perplexity(loss):.3f}"
        if self.bits:
            words = f"valid {loss / math.log(2):.4f} bits per byte"
        return Validation(loss, {"valid_base": loss}, words)

    def note(self, step: int) -> str:
        return ""

    def save(self, path: Path) -> None:
        self.save_to(path)

    def carried(self) -> dict[str, Tensor]:
        return {} if self.past is None else {f"past.{n}": t.contiguous() for n, t in enumerate(self.past)}

    def carry(self, tensors: dict[str, Tensor]) -> None:
        self.past = [tensors[f"past.{n}"].to(self.device) for n in range(len(tensors))] or None


def documents(stream: Stream, leave_out: set[int] | None = None) -> Tokens:
    """Where each document's tokens begin and end, [documents, 2], but for those whose numbers are left out."""
    bounds: Tokens = np.stack([stream.starts[:-1], stream.starts[1:] - 1], axis=1)
    return np.delete(bounds, sorted(leave_out or ()), axis=0)


def text_batches(text: Tokens, start: int, config: FitConfig, segment: int | None, seed: int) -> Batches:
    """One long text to learn from: in lanes of segments for a model with memory, else in blocks."""
    if segment is not None:
        segment = min(segment, len(text))
        return Lanes(text, start, segment, max(1, min(config.batch_tokens, len(text)) // segment))
    return TextBlocks(text, start, config.block, max(1, config.batch_tokens // config.block), seed)


def valid_batches(
    stream: Stream, start: int, start_always: bool, continuous: bool, config: FitConfig, segment: int | None
) -> tuple[Batches, int]:
    """The first valid tokens, and in how many batches."""
    if segment is not None:
        text = stream.text()[: config.valid_tokens]
        lanes = Lanes(text, start, min(segment, len(text)), 1)
        return lanes, len(lanes)
    if continuous:
        text = stream.text()
        bounds = np.array([[0, min(len(text), config.valid_tokens)]])
    else:
        text, bounds = stream.tokens, documents(stream)
        before = np.cumsum(bounds[:, 1] - bounds[:, 0]) - (bounds[:, 1] - bounds[:, 0])
        bounds = bounds[before < config.valid_tokens]
    pieces = Pieces(text, bounds, start, start_always, config.block, config.batch_tokens, 0)
    return pieces, pieces.batches_in(0)


def native_optimizer(model: NativeModel, config: LMTrainConfig) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "nesterov":
        groups = decayed(trained, config.weight_decay)
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=True)
    return adam(trained, config)


def adam(trained: list[nn.Parameter], config: FitConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decayed(trained, config.weight_decay), lr=config.lr, betas=config.betas)


def train_native(
    draft: Draft,
    model: NativeModel,
    vocabulary: Vocabulary,
    streams: dict[str, Stream],
    config: LMConfig,
    seed: int,
    log: Log = lambda name, value, step: None,
) -> Artifact:
    """Train a model of ours on its corpus; the artifact is a directory that `load_lm` reads."""
    fitting, start = config.train, vocabulary.start
    segment = model.options.segment if isinstance(model, TransformerXL) and config.continuous else None
    if config.continuous:
        batches = text_batches(streams["train"].text(), start, fitting, segment, seed)
    else:
        stream = streams["train"]
        batches = Pieces(stream.tokens, documents(stream), start, False, fitting.block, fitting.batch_tokens, seed)
    valid, count = valid_batches(streams["valid"], start, False, config.continuous, fitting, segment)

    def save(folder: Path) -> None:
        NativeLM(copy.deepcopy(model), vocabulary).save(folder)

    bits = isinstance(vocabulary, ByteVocabulary)
    task = LMTask(model, batches, valid, native_losses, fitting.accumulate, count, save, bits)
    plan = plan_of(fitting, fitting.steps, "lm", "lm.train")
    tokens = fitting.batch_tokens * fitting.accumulate
    best = fit(draft, task, native_optimizer(model, fitting), plan, tokens, seed, config.device == "cpu", log)
    return finish_lm(draft, best, {**fit_facts(draft, plan, model), "kind": "scratch"})


def finish_lm(draft: Draft, best: Path, facts: dict[str, Any], beside: tuple[str, ...] = ()) -> Artifact:
    """The best step's files become the artifact, with others that are there already."""
    names = [path.name for path in sorted(best.iterdir())]
    for name in names:
        shutil.copyfile(best / name, draft.file(name))
    draft.write_text("history.json", json.dumps(draft.notes["history"], indent=1))
    return draft.finish(facts, files=(*names, "history.json", *beside))
