"""Passages of the store, found by the tokens they share with a query (BM25): what a prompt is usually given.

Tokens are ids, so nothing here depends on a language.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.corpus.stream import Stream
from gnnlm.errors import ConfigError
from gnnlm.retrieval.index import Ids

K1, B = 1.5, 0.75  # the usual weights of repeated tokens and of passage length


def plan_passages(starts: npt.ArrayLike, length: int) -> Ids:
    """Return where each passage begins and ends, [N, 2]: documents are cut into pieces of `length` tokens.

    The last passage of a document reaches back, so that it is not shorter than the others; only a shorter document
    makes a shorter passage. `starts` are those of a stream, whose documents end with a position that has no token.

    >>> plan_passages([0, 6, 9], length=3).tolist()
    [[0, 3], [2, 5], [6, 8]]
    """
    found = []
    for first, last in itertools.pairwise(np.asarray(starts).tolist()):
        for begin in range(first, last - 1, length):
            begin = max(first, min(begin, last - 1 - length))
            found.append((begin, min(begin + length, last - 1)))
    return np.array(found, dtype=np.int64).reshape(-1, 2)


class PassageIndex:
    """BM25 over passages of token ids."""

    def __init__(self, passages: list[Ids]) -> None:
        self.passages = passages
        whole = np.concatenate(passages) if passages else np.empty(0, dtype=np.int64)
        self._vocabulary, ids = np.unique(whole, return_inverse=True)
        self._bm25 = open_bm25() if len(whole) else None
        if self._bm25 is not None:
            ends = np.cumsum([len(passage) for passage in passages])
            known = {number: number for number in range(len(self._vocabulary))}
            lists = [part.tolist() for part in np.split(ids, ends[:-1])]
            self._bm25.index((lists, known), create_empty_token=False, show_progress=False)

    @classmethod
    def over(cls, stream: Stream, length: int) -> PassageIndex:
        """Return passages of `length` tokens of a split."""
        tokens = np.asarray(stream.tokens, dtype=np.int64)
        return cls([tokens[first:last] for first, last in plan_passages(stream.starts, length).tolist()])

    def __len__(self) -> int:
        return len(self.passages)

    def scores(self, query: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the BM25 score of every passage, [N]; a token that the query repeats counts each time."""
        query = np.asarray(query, dtype=np.int64)
        known = query[np.isin(query, self._vocabulary)]
        if self._bm25 is None or not len(known):
            return np.zeros(len(self))
        ids = np.searchsorted(self._vocabulary, known)
        found: npt.NDArray[np.float64] = self._bm25.get_scores_from_ids(ids.tolist())
        return found

    def find(self, query: npt.ArrayLike, count: int) -> tuple[int, ...]:
        """Return the best passages, best first, ties by number; only passages that share a token with the query."""
        scores = self.scores(query)
        best = np.argsort(-scores, kind="stable")[:count]
        return tuple(best[scores[best] > 0].tolist())


def open_bm25() -> Any:
    """Return an empty BM25 index; raise with advice if the library is missing."""
    try:
        import bm25s
    except ImportError:
        raise ConfigError(
            "eval.context_retrieval needs bm25s, which is not installed; install it: pip install 'gnnlm[passages]'"
        ) from None
    return bm25s.BM25(k1=K1, b=B, method="lucene", dtype="float64")
