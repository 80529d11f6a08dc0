"""Where written words come from.

The mixture p(y) = sum over rows r of lambda w_r [token_r = y] + (1 - lambda) p_model(y) is a sum, so the share of a row
in the token that was written is exact, and all shares with the model's own add up to one. They are shares of the
predictor's distribution, before temperature and filters. What the graph network took from a document is not among
them: see `Book.influence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gnnlm.datastore.store import Store
from gnnlm.write.generate_options import SHOWN_SOURCES
from gnnlm.write.text_state import Written

LEFT, RIGHT = 8, 8  # tokens of a source's surroundings
LEAST_SHARE = 0.05  # a row with less supports no span


@dataclass(frozen=True)
class Source:
    """A place in the store that voted for a token; `start` and `end` are the token's characters in the document."""

    document: str
    start: int
    end: int
    before: str
    token: str
    after: str
    similarity: float
    share: float
    position: int


@dataclass(frozen=True)
class Token:
    """A token that was written: its text, its log-probability, and how much of its probability is the book's.

    `book` is the share of all sources together, `sources` are the largest of them; the model's own share is 1 - book.
    """

    text: str
    id: int
    log_prob: float
    base_log_prob: float
    book: float
    sources: list[Source]


@dataclass(frozen=True)
class Span:
    """Written tokens that follow one passage of a document, word for word.

    `first` and `last` count tokens of the text, both included; `start` and `end` are characters of the document.
    """

    text: str
    first: int
    last: int
    document: str
    start: int
    end: int
    share: float  # the mean share of the passage in these tokens

    @property
    def tokens(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Generation:
    """A written text, a record of each token, and the passages that it follows."""

    text: str
    finish_reason: str
    tokens: list[Token]
    spans: list[Span]
    steps: int
    drafted: int
    accepted: int
    searches: int
    seconds: float

    def __str__(self) -> str:
        return self.text

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def book(self) -> float:
        """The mean share of the book."""
        return float(np.mean([token.book for token in self.tokens])) if self.tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values; a span says how many tokens and characters it copies."""
        out = asdict(self)
        for span, given in zip(self.spans, out["spans"], strict=True):
            given["tokens"], given["characters"] = span.tokens, span.end - span.start
        return out


def sources_of(written: Written, store: Store, count: int = SHOWN_SOURCES) -> list[Source]:
    """The rows with the largest shares, largest first."""
    voters = written.voters
    order = voters.share.argsort(descending=True, stable=True)[:count]
    order = order[voters.share[order] > 0]
    found = []
    for position, similarity, share in zip(
        voters.positions[order].tolist(), voters.similarity[order].tolist(), voters.share[order].tolist(), strict=True
    ):
        passage = store.passage(position, LEFT, RIGHT)
        start, end = store.characters(position)
        found.append(
            Source(
                passage.document, start, end, passage.before, passage.token, passage.after, similarity, share, position
            )
        )
    return found


def spans_of(written: Sequence[Written], pieces: Sequence[str], store: Store) -> list[Span]:
    """The longest runs of tokens whose rows follow one another in a document; no token is in two."""
    runs = sorted(_runs(written), key=lambda run: (-run[1], -run[3], run[0]))
    taken = np.zeros(len(written), dtype=bool)
    spans = []
    for first, length, position, share in runs:
        if length < 2 or taken[first : first + length].any():
            continue
        taken[first : first + length] = True
        start, end = store.characters(position)[0], store.characters(position + length - 1)[1]
        document = store.passage(position, 0, 0).document
        text = "".join(pieces[first : first + length])
        spans.append(Span(text, first, first + length - 1, document, start, end, share / length))
    return sorted(spans, key=lambda span: span.first)


def _runs(tokens: Sequence[Written]) -> Iterator[tuple[int, int, int, float]]:
    """Maximal runs: their first token, length, first position in the store, and summed share."""
    open_runs: dict[int, tuple[int, int, float]] = {}  # by the position that would go on: first token, length, share
    for place, token in enumerate(tokens):
        strong = token.voters.share >= LEAST_SHARE
        rows = zip(token.voters.positions[strong].tolist(), token.voters.share[strong].tolist(), strict=True)
        going_on: dict[int, tuple[int, int, float]] = {}
        for position, share in rows:
            first, length, total = open_runs.pop(position, (place, 0, 0.0))
            going_on[position + 1] = first, length + 1, total + share
        yield from _closed(open_runs)
        open_runs = going_on
    yield from _closed(open_runs)


def _closed(runs: dict[int, tuple[int, int, float]]) -> Iterator[tuple[int, int, int, float]]:
    for following, (first, length, share) in runs.items():
        yield first, length, following - length, share
