"""What writing returns: a text, its tokens with their sources, and the passages that it follows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


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
class WrittenText:
    """A written text, a record of each token, and the passages that the text follows."""

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
        """Return plain values; a span also says how many tokens and characters it copies."""
        values = asdict(self)
        for span, fields in zip(self.spans, values["spans"], strict=True):
            fields["tokens"] = span.tokens
            fields["characters"] = span.end - span.start
        return values
