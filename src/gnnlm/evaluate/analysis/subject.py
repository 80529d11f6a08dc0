"""A run as the analysis reads it: its parts, opened when first needed, and its test tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact
from gnnlm.config import Config
from gnnlm.corpus.stream import Stream
from gnnlm.datastore.store import Store
from gnnlm.evaluate.report import Report, read_report
from gnnlm.gnn.model import GnnModel
from gnnlm.lm.base_lm import BaseLM
from gnnlm.predict.bootstrap import Floats, Ints, bootstrap_interval, change_interval
from gnnlm.predict.knn import Mix
from gnnlm.predict.predictor import Predictor, perplexity
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.retrieval.index import Index


class Opened(Protocol):
    """The parts of a run; `gnnlm.run.snapshot.Snapshot` is one."""

    @property
    def lm(self) -> BaseLM: ...

    @property
    def streams(self) -> Mapping[str, Stream]: ...

    @property
    def encoded(self) -> Mapping[str, Store]: ...

    @property
    def store(self) -> Store: ...

    @property
    def index(self) -> Index: ...

    @property
    def gnn(self) -> GnnModel | None: ...

    @property
    def predictor(self) -> Predictor: ...

    def searched(self, split: str) -> SearchedText: ...

    def predictor_with(self, mixes: dict[str, Mix]) -> Predictor: ...


class Subject:
    """What is analysed. Arrays over test tokens are in the order of positions, ends of documents left out."""

    def __init__(
        self, name: str, config: Config, parts: Opened, artifact: Callable[[str], Artifact], stages: Collection[str]
    ) -> None:
        """`artifact` opens that of a stage; `stages` are those that are done."""
        self.name, self.config, self.parts, self.artifact, self.stages = name, config, parts, artifact, stages

    @property
    def seed(self) -> int:
        return self.config.seed

    @cached_property
    def report(self) -> Report:
        return read_report(self.artifact("eval"))

    @cached_property
    def scores(self) -> dict[str, Floats]:
        """The log-probability of every test token by predictor, as the report has it."""
        scored = self.artifact("eval")
        names = self.report.predictors
        return {name: np.asarray(scored.array(f"{name}.log_probs.npy"), dtype=np.float64) for name in names}

    @property
    def best(self) -> str:
        """The last predictor: +GNN+kNN, or +kNN where there is no graph network."""
        return self.report.predictors[-1]

    @cached_property
    def test(self) -> SearchedText:
        return self.parts.searched("test")

    @cached_property
    def positions_N(self) -> Tensor:
        """The position of every test token."""
        return torch.from_numpy(np.flatnonzero(np.asarray(self.parts.streams["test"].tokens) >= 0))

    @cached_property
    def targets_N(self) -> Tensor:
        return self.test.text.tokens(self.positions_N)

    @cached_property
    def document_N(self) -> Ints:
        """The number of the document of every test token."""
        return self.parts.streams["test"].document_of(self.positions_N.numpy())

    @cached_property
    def place_N(self) -> Ints:
        """The number of tokens before every test token in its document."""
        stream = self.parts.streams["test"]
        return self.positions_N.numpy() - stream.starts[self.document_N]

    def changed(self, scores: Floats, against: Floats, where: Ints | None = None) -> dict[str, float | None]:
        """Perplexity of some test tokens and its change against other scores of them, with the paired 95% interval."""
        document = self.document_N if where is None else self.document_N[where]
        gain, samples = scores - against, self.config.eval.bootstrap
        interval = change_interval(gain, np.unique(document, return_inverse=True)[1], samples, self.seed)
        low, high = interval or (None, None)
        return {
            "ppl": perplexity(-float(scores.mean())),
            "change": perplexity(-float(gain.mean())) - 1,
            "change_low": low,
            "change_high": high,
        }

    def interval(self, scores: Floats) -> tuple[float, float]:
        """95% interval of the perplexity of all test tokens."""
        return bootstrap_interval(scores, self.document_N, self.config.eval.bootstrap, self.seed)
