"""The sizes that a plan is computed from: parameters and widths of the models, and the amount of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gnnlm.config import Config
from gnnlm.corpus.benchmarks import BENCHMARKS
from gnnlm.corpus.stream import SPLITS
from gnnlm.errors import ConfigError
from gnnlm.gnn.gnn_options import resolve_options
from gnnlm.gnn.model import GnnModel
from gnnlm.lm.architecture import build_model
from gnnlm.lm.base_lm import BaseLM
from gnnlm.lm.head import SoftmaxHead
from gnnlm.lm.native_lm import NativeLM

UNKNOWN = "is not known before the corpus is built; build it first: gnnlm corpus, with this config"


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a base model and of its graph network; `parameters` are those of the base model."""

    parameters: int
    gnn_parameters: int
    receptive_field: int
    width: int
    vocabulary: int
    head_parameters: int

    @classmethod
    def of(cls, config: Config, lm: BaseLM) -> ModelSizes:
        field = min(config.lm.window, lm.receptive_field or config.lm.window)
        head = sum(weight.numel() for weight in lm.head.state_dict().values())
        return cls(lm.parameters, network_parameters(config, lm.width), field, lm.width, lm.vocab_size, head)

    @classmethod
    def stored(cls, config: Config, facts: Mapping[str, Any]) -> ModelSizes:
        """What the facts of a finished store say; the base model's own size is left at 0, as it is not loaded."""
        width, vocabulary, field = int(facts["width"]), int(facts["vocab_size"]), int(facts["receptive_field"])
        return cls(0, network_parameters(config, width), field, width, vocabulary, vocabulary * width)


def untrained_lm(config: Config, vocabulary: int, device: str = "meta") -> NativeLM:
    """Build a base model of the config's shape; on the device `meta`, no memory is allocated for its weights."""
    with torch.device(device):
        return NativeLM(build_model(config.lm.architecture, vocabulary))


def network_parameters(config: Config, width: int) -> int:
    """Count the parameters of the graph network over a base model of this width, without allocating them."""
    with torch.device("meta"):
        gnn = GnnModel(resolve_options(config.gnn, width), SoftmaxHead(torch.empty(1, width)))
    return sum(p.numel() for p in gnn.parameters())


@dataclass(frozen=True)
class TextSize:
    """How much text a split has."""

    tokens: int
    documents: int

    @property
    def positions(self) -> int:
        return self.tokens + self.documents

    def scaled(self, tokens: int) -> TextSize:
        """Return the size of so many tokens in documents of the same length."""
        return TextSize(tokens, self.documents * tokens // max(1, self.tokens))


def text_sizes(config: Config, corpus: Mapping[str, Any] | None) -> dict[str, TextSize]:
    """Return the size of each split: as built (the facts of the corpus), as published, or as limited by the config."""
    if corpus is not None:
        return {split: TextSize(int(corpus[split]["tokens"]), int(corpus[split]["documents"])) for split in SPLITS}
    limits = {split: getattr(config.corpus, f"max_{split}_tokens") for split in SPLITS}
    if (source := _published(config)) is not None:
        benchmark = BENCHMARKS[source]
        documents = benchmark.sentences or (0, 0, 0)  # the articles of the others are too few to matter
        return {
            split: TextSize(min(tokens, limits[split] or tokens), count)
            for split, tokens, count in zip(SPLITS, benchmark.tokens, documents, strict=True)
        }
    if any(limit is None for limit in limits.values()):
        raise ConfigError(f"the amount of text {UNKNOWN}")
    return {split: TextSize(int(limits[split]), 0) for split in SPLITS}


def vocabulary_size(config: Config, corpus: Mapping[str, Any] | None) -> int:
    """Return the size of the corpus's vocabulary: as built (the facts of the corpus), or as published."""
    if corpus is not None:
        return int(corpus["vocabulary"]["size"])
    if (source := _published(config)) is None:
        raise ConfigError(f"the vocabulary {UNKNOWN}")
    return BENCHMARKS[source].vocabulary


def _published(config: Config) -> str | None:
    """The benchmark that the corpus is, if it is one whose sizes are published."""
    corpus = config.corpus
    return corpus.source if corpus.is_benchmark and corpus.train is None else None
