"""Documents: as text, and as tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Tokenize = Callable[[str], tuple[list[int], list[int]]]  # the token ids of a text, and where in it each token begins


@dataclass(frozen=True)
class Document:
    """A text with the name it is cited by."""

    name: str
    text: str


@dataclass(frozen=True)
class DocumentCollection:
    """Documents that can be read more than once, without holding them all in memory."""

    count: int
    open: Callable[[], Iterator[Document]]

    @classmethod
    def of(cls, documents: list[Document]) -> DocumentCollection:
        return cls(len(documents), lambda: iter(documents))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Document]:
        return self.open()


SplitDocuments = dict[str, DocumentCollection]


@dataclass(frozen=True)
class TokenizedDocument:
    """A document with its token ids and the offset in the text at which each token starts."""

    name: str
    text: str
    tokens: list[int]
    offsets: list[int]

    @classmethod
    def make(cls, name: str, text: str, tokenize: Tokenize, limit: int | None) -> TokenizedDocument:
        whole = cls(name, text, *tokenize(text))
        return whole if limit is None else whole.cut(limit)

    def cut(self, limit: int) -> TokenizedDocument:
        """Return the document, or its beginning if it has more than `limit` tokens."""
        if len(self.tokens) <= limit:
            return self
        text = self.text[: self.offsets[limit]]
        return TokenizedDocument(self.name, text, self.tokens[:limit], self.offsets[:limit])
