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
from gnnlm.errors import ConfigError, CorpusError
from gnnlm.graph.assemble import Assembler
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.retrieval.index import Ids, Index
from gnnlm.run import Run


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
        run.open_all()  # refuses an unfinished or foreign run before anything is loaded

    def score(self, text: str, exclude: Iterable[str] = ()) -> Scores:
        """Log-probability of every token of the text, by predictor.

        `exclude` names documents of the store that may not be looked up, such as the text's own.
        """
        offsets, source = self._look_up(text, exclude)
        predictor = self.run.predictor
        parts = [
            predictor.target_log_probs(block, source) for block in predictor.blocks(source, self.run.config.eval.block)
        ]
        rows = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in PREDICTORS}
        ends = [*offsets[1:], len(text)]
        return Scores([text[start:end] for start, end in zip(offsets, ends, strict=True)], **rows)

    def neighbors(
        self, text: str, k: int = 3, exclude: Iterable[str] = (), left: int = 8, right: int = 8
    ) -> list[list[Neighbor]]:
        """For every token of the text, the k places in the store looked up to predict it, nearest first."""
        if k < 1:
            raise ConfigError(f"neighbors: k must be at least 1 (got {k})")
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
        """Where each token starts, and the text as one document with the neighbours of every position."""
        from gnnlm.datastore.encode import encode_tokens, round_states
        from gnnlm.datastore.store import States
        from gnnlm.retrieval.search import search_allowed

        run, config = self.run, self.run.config
        if not isinstance(text, str):
            raise CorpusError(f"expected a string to look up, got {type(text).__name__}")
        tokens, offsets = run.lm.tokenize(text)
        if not tokens:
            raise CorpusError("there is nothing to score: the text has no token")
        encoded = encode_tokens(run.lm, np.asarray(tokens, dtype=np.int64), config.lm, config.store.key)
        states = round_states(encoded.states, config.store.dtype)
        keys = states if encoded.keys is None else round_states(encoded.keys, config.store.dtype)
        k = min(k or config.search.k, len(self._index))
        stream, barred = run.streams["train"], self._documents(exclude)

        def allowed(_: Ids, found: Ids) -> npt.NDArray[np.bool_]:
            return ~np.isin(stream.document_of(found), barred)

        forbidden = np.full(len(states), (stream.starts[barred + 1] - stream.starts[barred]).sum())
        ids, similarity = search_allowed(self._index, keys, k, allowed, forbidden)
        queries = States.make(
            torch.from_numpy(states), torch.tensor([*tokens, END]), torch.tensor([0, len(tokens) + 1])
        )
        return offsets, Assembler(queries, run.store, ids, similarity, config.gnn.left, config.gnn.right)

    def _documents(self, names: Iterable[str]) -> Ids:
        """The numbers of the store's documents with these names."""
        wanted = {names} if isinstance(names, str) else set(names)
        documents = self.run.streams["train"].documents if wanted else []
        numbers = [number for number, document in enumerate(documents) if document["name"] in wanted]
        unknown = wanted - {documents[number]["name"] for number in numbers}
        if unknown:
            raise CorpusError(f"no document named {sorted(unknown)[0]!r} in the store; names are as in neighbors()")
        return np.asarray(numbers, dtype=np.int64)


def open_book(path: str | Path) -> Book:
    """Open a finished run directory."""
    return Book(Run(load_config(Path(path)), reading=True))
