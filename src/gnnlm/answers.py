"""The results of a book's methods: scores, neighbours, distributions, attention, documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gnnlm.datastore.store import Store
from gnnlm.predict.predictor import PREDICTORS

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scores:
    """The tokens of a text and, by predictor, the log-probability of each and whether it was the likeliest.

    `offsets` are where each token begins and ends in the text; the bytes of one character may be several tokens, which
    then share it.
    """

    tokens: list[str]
    ids: list[int]
    offsets: list[tuple[int, int]]
    log_probs: Mapping[str, Floats]
    top1: Mapping[str, npt.NDArray[np.bool_]]

    def __getattr__(self, name: str) -> Floats:
        """`scores.base`, `scores.knn`, `scores.gnn`, `scores.gnn_knn`: the log-probabilities of a predictor."""
        if name not in PREDICTORS:
            raise AttributeError(name)
        if name not in self.log_probs:
            raise AttributeError(f"these scores have no {name}; they have {', '.join(self.log_probs)}")
        return self.log_probs[name]

    def __len__(self) -> int:
        return len(self.ids)

    def perplexity(self, predictor: str | None = None) -> float:
        """Return the perplexity of the text under a predictor; by default, under the last one scored."""
        return float(np.exp(-self.log_probs[predictor or list(self.log_probs)[-1]].mean()))


@dataclass(frozen=True)
class Neighbour:
    """A place in the store that resembles the text before a token; `token` is what comes next there.

    `start` and `end` are the token's characters in the document.
    """

    document: str
    similarity: float
    position: int
    start: int
    end: int
    before: str
    token: str
    after: str

    @classmethod
    def at(cls, store: Store, position: int, similarity: float, left: int, right: int) -> Neighbour:
        """Return a position with `left` tokens before it and `right` after it."""
        passage = store.passage(position, left, right)
        start, end = store.characters(position)
        return cls(passage.document, similarity, position, start, end, passage.before, passage.token, passage.after)


@dataclass(frozen=True)
class Next:
    """The distribution of the next token by predictor: log-probabilities over the vocabulary."""

    log_probs: Mapping[str, Floats]
    pieces: Mapping[str, list[tuple[str, float]]]  # the likeliest tokens and their probabilities, likeliest first


@dataclass(frozen=True)
class Attention:
    """The neighbours that the graph network saw, and its attention over them, [layers, heads, neighbours, slots].

    The slots are those of a neighbour's window that edges lead from. `context` is its attention over the last tokens
    of the text, [layers, heads, tokens], whose ids are `context_ids`; for a short text, the first is the start token.
    Each head's attention over neighbours sums to one, and so does that over the context.
    """

    neighbours: list[Neighbour]
    weights: Floats
    context_ids: list[int]
    context: Floats

    def by_neighbour(self) -> Floats:
        """Return the attention on each neighbour, [layers, neighbours]: the mean over heads, summed over the slots."""
        summed: Floats = self.weights.mean(1).sum(-1)[:, : len(self.neighbours)]
        return summed

    def by_context(self) -> Floats:
        """Return the attention on each of the last tokens, [layers, tokens]: the mean over heads."""
        mean: Floats = self.context.mean(1)
        return mean


@dataclass(frozen=True)
class StoredDocument:
    """A document of the store, and its tags."""

    name: str
    tokens: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class DocumentText:
    """A document of the store: its text, and the character at which each token begins, then where the last one ends."""

    name: str
    text: str
    offsets: list[int]
