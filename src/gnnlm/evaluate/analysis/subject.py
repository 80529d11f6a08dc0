"""A run as the analysis reads it: its components, its test tokens, and estimates of what reading them costs.

Shapes: P positions, N test tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact
from gnnlm.config import Config
from gnnlm.datastore.store import mapped
from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.report import Report, read_report
from gnnlm.predict.bootstrap import Floats, Ints
from gnnlm.predict.split_scoring import SearchedText
from gnnlm.retrieval.index import Index, keys_of
from gnnlm.retrieval.open_index import open_exact

if TYPE_CHECKING:
    from gnnlm.run.snapshot import Snapshot


@dataclass(frozen=True)
class DocumentSample:
    """Some whole test documents: their numbers, their positions (ends included), and the numbers of their tokens."""

    documents: Ints
    positions_P: Tensor
    tokens_N: Ints


class Subject:
    """The run that is analysed. Arrays over test tokens are ordered by position and leave out the ends of documents."""

    def __init__(
        self,
        name: str,
        config: Config,
        snapshot: Snapshot,
        artifact: Callable[[str], Artifact],
        stages: Collection[str],
    ) -> None:
        """`artifact` opens the artifact of a stage; `stages` are those that are done."""
        self.name = name
        self.config = config
        self.snapshot = snapshot
        self.artifact = artifact
        self.stages = stages

    @property
    def seed(self) -> int:
        return self.config.seed

    # -- what the report has -----------------------------------------------------------------------------------

    @cached_property
    def report(self) -> Report:
        return read_report(self.artifact("eval"))

    @cached_property
    def scores(self) -> dict[str, Floats]:
        """The log-probability of every test token by predictor, as in the report."""
        scored = self.artifact("eval")
        names = self.report.predictors
        return {name: np.asarray(scored.array(f"{name}.log_probs.npy"), dtype=np.float64) for name in names}

    @property
    def best(self) -> str:
        """The last predictor: +GNN+kNN, or +kNN where there is no graph network."""
        return self.report.predictors[-1]

    # -- test tokens -------------------------------------------------------------------------------------------

    @cached_property
    def test(self) -> SearchedText:
        return self.snapshot.searched("test")

    @cached_property
    def positions_N(self) -> Tensor:
        """The position of every test token."""
        return torch.from_numpy(np.flatnonzero(np.asarray(self.snapshot.streams["test"].tokens) >= 0))

    @cached_property
    def targets_N(self) -> Tensor:
        return self.test.text.tokens(self.positions_N)

    @cached_property
    def document_N(self) -> Ints:
        """The number of the document of every test token."""
        return self.snapshot.streams["test"].document_of(self.positions_N.numpy())

    @cached_property
    def place_N(self) -> Ints:
        """The number of tokens before every test token in its document."""
        stream = self.snapshot.streams["test"]
        return self.positions_N.numpy() - stream.starts[self.document_N]

    def changed(self, scores: Floats, against: Floats, tokens: Ints | None = None) -> PerplexityChange:
        """Compare two scores of some test tokens (by default of all)."""
        document = self.document_N if tokens is None else self.document_N[tokens]
        numbered = np.unique(document, return_inverse=True)[1]
        return PerplexityChange.paired(scores, against, numbered, self.config.eval.bootstrap, self.seed)

    def sample_documents(self, most: int) -> DocumentSample:
        """Draw whole test documents with at most so many tokens in all; the shortest if none is that short.

        Measurements that search anew use such a sample, because all of test would take long.
        """
        starts = self.snapshot.streams["test"].starts
        documents = fitting(np.diff(starts) - 1, most, self.seed)
        positions = [torch.arange(int(starts[number]), int(starts[number + 1])) for number in documents]
        tokens = np.flatnonzero(np.isin(self.document_N, documents))
        return DocumentSample(documents, torch.cat(positions), tokens)

    # -- search ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        return str(self.snapshot.predictor.head.device)

    def keys(self, split: str) -> Tensor:
        """The keys of all positions of a held-out split, [P, D]."""
        return mapped(keys_of(self.artifact("encode"), split))

    def exact_index(self) -> Index:
        """Exact search over the rows of the run's index."""
        metric = self.artifact("index").facts["metric"]
        return open_exact(self.artifact("encode"), self.snapshot.streams["train"], metric, self.device)

    # -- estimates, from the seconds that the report took ------------------------------------------------------------

    def seconds_to_score(self, split: str = "test") -> float:
        """The seconds that all predictors take over a split, without encoding and search."""
        seconds = self.report.seconds
        return (2 * seconds["head"] + seconds["gnn"] + 4 * seconds["knn"]) * self._times_test(split)

    def seconds_of_network(self, split: str) -> float:
        """The seconds that the graph network takes over a split."""
        return self.report.seconds["gnn"] * self._times_test(split)

    def seconds_to_search(self, split: str) -> float:
        """The seconds to search all positions of a split, at the speed of the run's index."""
        return self.report.seconds["search"] * self._times_test(split)

    def seconds_of_sample(self, tokens: int) -> float:
        """The seconds to search and score so many test tokens, or all if there are fewer."""
        share = min(1.0, tokens / self.report.test_tokens)
        return share * (self.report.seconds["search"] + self.seconds_to_score())

    def _times_test(self, split: str) -> float:
        return len(self.snapshot.streams[split]) / self.report.test_tokens


def fitting(sizes: Ints, most: int, seed: int) -> Ints:
    """Numbers of documents, ascending, drawn in random order, each kept if it still fits; the shortest if none does.

    >>> fitting(np.array([3, 9, 2]), 5, seed=0).tolist(), fitting(np.array([7, 6]), 5, seed=0).tolist()
    ([0, 2], [1])
    """
    chosen: list[int] = []
    total = 0
    for number in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        if total + sizes[number] <= most:
            chosen.append(number)
            total += int(sizes[number])
    return np.array(sorted(chosen) or [int(sizes.argmin())])
