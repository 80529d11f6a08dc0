"""The Python API: an open-book model from a finished run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gnnlm.config import load_config
from gnnlm.corpus.stream import END
from gnnlm.errors import CorpusError
from gnnlm.graph.assemble import Assembler
from gnnlm.pipeline import Run
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.retrieval.index import Index


@dataclass(frozen=True)
class Scores:
    """A text's tokens and the log-probability of each under the four predictors."""

    tokens: list[str]
    base: npt.NDArray[np.float32]
    knn: npt.NDArray[np.float32]
    gnn: npt.NDArray[np.float32]
    gnn_knn: npt.NDArray[np.float32]

    def perplexity(self, predictor: str = "gnn_knn") -> float:
        return float(np.exp(-getattr(self, predictor).mean()))


@dataclass(frozen=True)
class Neighbor:
    """A place in the store that resembles the text before a token; `token` is what stands there next."""

    document: str
    similarity: float
    position: int
    before: str
    token: str
    after: str


class Book:
    """A finished run, opened for use. Parts are loaded when first needed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        run.artifact("tune")  # refuses an unfinished or foreign run before anything is loaded

    def score(self, text: str, exclude: Iterable[str] = ()) -> Scores:
        """Log-probability of every token of the text, by predictor.

        `exclude` names documents of the store that may not be looked up, such as the text's own.
        """
        tokens, source = self._look_up(text, exclude)
        predictor = self.run.predictor
        parts = [
            predictor.target_log_probs(block, source) for block in predictor.blocks(source, self.run.config.eval.block)
        ]
        rows = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in PREDICTORS}
        return Scores([self.run.lm.piece(token) for token in tokens], **rows)

    def neighbors(
        self, text: str, k: int = 3, exclude: Iterable[str] = (), left: int = 8, right: int = 8
    ) -> list[list[Neighbor]]:
        """For every token of the text, the k places in the store looked up to predict it, nearest first."""
        _, source = self._look_up(text, exclude, k)
        store = self.run.streams["train"]
        found = []
        for ids, similarity in zip(source.ids[:-1], source.similarity[:-1], strict=True):
            line = []
            for row, score in zip(ids, similarity, strict=True):
                if row >= 0:
                    passage = store.passage(int(row), left, right)
                    line.append(
                        Neighbor(passage.document, float(score), int(row), passage.before, passage.token, passage.after)
                    )
            found.append(line)
        return found

    @cached_property
    def _index(self) -> Index:
        from gnnlm.retrieval.index import open_index

        return open_index(self.run.artifact("index"), self.run.config.index.probes)

    def _look_up(self, text: str, exclude: Iterable[str], k: int | None = None) -> tuple[list[int], Assembler]:
        """Encode the text as one document and search for every position of it."""
        from gnnlm.datastore.encode import encode_tokens, round_states
        from gnnlm.datastore.store import States
        from gnnlm.retrieval.search import compact

        run, config = self.run, self.run.config
        tokens, _ = run.lm.tokenize(text)
        if not tokens:
            raise CorpusError("there is nothing to score: the text has no token")
        encoded = encode_tokens(run.lm, np.asarray(tokens, dtype=np.int64), config.lm)
        states = round_states(encoded, config.store.dtype)
        first, last = self._excluded_ranges(exclude)
        k = min(k or config.search.k, len(self._index))
        ids, similarity = self._index.search(states, k + int((last - first + 1).sum()))
        inside = (ids[..., None] >= first) & (ids[..., None] <= last)
        ids, similarity = compact(ids, similarity, (ids >= 0) & ~inside.any(-1), k)
        queries = States.make(
            torch.from_numpy(states), torch.tensor([*tokens, END]), torch.tensor([0, len(tokens) + 1])
        )
        return tokens, Assembler(queries, run.states["train"], ids, similarity, config.gnn.left, config.gnn.right)

    def _excluded_ranges(self, exclude: Iterable[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        names = set(exclude)
        stream = self.run.streams["train"]
        numbers = [i for i, d in enumerate(stream.documents) if d["name"] in names] if names else []
        unknown = names - {stream.documents[i]["name"] for i in numbers}
        if unknown:
            raise CorpusError(f"no document named {sorted(unknown)[0]!r} in the store; names are as in neighbors()")
        return stream.starts[numbers], stream.starts[np.asarray(numbers, dtype=np.int64) + 1] - 1


def open_book(path: str | Path) -> Book:
    """Open a finished run directory."""
    return Book(Run(load_config(Path(path))))
