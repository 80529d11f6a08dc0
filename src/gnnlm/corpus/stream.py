"""Token streams: documents laid end to end, with one position per token and one more at the end of each document.

The position after a document's last token has no token (`END`); its state is the one that has read the whole document.
Positions, store rows, index ids and neighbour nodes share one numbering.

The text that is looked up is cut into segments of whole documents, each written and read by itself.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from gnnlm.artifact import Artifact, ArtifactFiles, concatenate
from gnnlm.corpus.document import Document, TokenizedDocument

END = -1
TEXT = "text"  # the part of a segment that holds its documents
SURROGATES = "surrogatepass"  # bytes of enwik8 that are not UTF-8 are half surrogate pairs in its text
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Passage:
    """A token in its context: its document, the text before it, the token itself, the text after it."""

    document: str
    before: str
    token: str
    after: str


class StreamDocuments(Sequence[Document]):
    """The documents of a stream, by number or slice; each is read when it is asked for."""

    def __init__(self, texts: Sequence[ArtifactFiles]) -> None:
        self._texts = texts
        self._lines = [text.array("lines.npy") for text in texts]
        self._bases = np.cumsum([0, *(len(lines) - 1 for lines in self._lines)])
        self._file = lru_cache(maxsize=None)(self._file_of)
        self._read = lru_cache(maxsize=64)(self._read_document)

    def __len__(self) -> int:
        return int(self._bases[-1])

    @overload
    def __getitem__(self, number: int) -> Document: ...

    @overload
    def __getitem__(self, number: slice) -> list[Document]: ...

    def __getitem__(self, number: int | slice) -> Document | list[Document]:
        numbers = range(len(self))[number]
        return self._read(numbers) if isinstance(numbers, int) else [self._read(each) for each in numbers]

    def _read_document(self, number: int) -> Document:
        text = int(np.searchsorted(self._bases, number, side="right")) - 1
        line = number - int(self._bases[text])
        begin, end = self._lines[text][line : line + 2].tolist()
        with self._file(text).open("rb") as file:
            file.seek(begin)
            record = json.loads(file.read(end - begin).decode("utf-8", SURROGATES))
        return Document(record["name"], record["text"])

    def _file_of(self, text: int) -> Path:
        return self._texts[text].artifact.file(f"{self._texts[text].prefix}documents.jsonl")


class TokenStream(ABC):
    """Documents laid end to end: their tokens, and by position their names, texts and offsets."""

    tokens: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]  # of each document, and the end
    bases: npt.NDArray[np.int64]  # of each segment, and the end

    @property
    @abstractmethod
    def segments(self) -> Sequence[TokenStream]:
        """Each segment as a stream of its own; a stream of one segment is that segment."""

    @property
    @abstractmethod
    def names(self) -> Sequence[str]: ...

    @property
    @abstractmethod
    def documents(self) -> Sequence[Document]: ...

    @property
    @abstractmethod
    def offsets(self) -> npt.NDArray[Any]:
        """The character at which each position's token begins; past a document's last token, the text's length."""

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.tokens)

    @property
    def token_count(self) -> int:
        """The number of tokens, without the position at the end of each document."""
        return len(self.tokens) - (len(self.starts) - 1)

    def text(self, dtype: npt.DTypeLike | None = np.int64) -> npt.NDArray[Any]:
        """Return all tokens, one document after another; `None` leaves them in the type they are stored in."""
        tokens = np.asarray(self.tokens, dtype=dtype)
        text: npt.NDArray[Any] = tokens[tokens != END]
        return text

    def places(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.int64]:
        """Return the offset of each position when all documents are read as one text, without the ends of documents.

        Of the positions from `first` on, before `last`.
        """
        positions = np.arange(first, len(self) if last is None else last)
        return positions - self.document_of(positions)

    def document_of(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the number of the document of each position."""
        found: npt.NDArray[np.int64] = np.searchsorted(self.starts, positions, side="right") - 1
        return found

    def passage(self, position: int, left: int, right: int) -> Passage:
        """Return the token at a position with `left` tokens before it and `right` after it, within its document."""
        number = int(self.document_of(position))
        first = max(int(self.starts[number]), position - left)
        return Passage(
            self.names[number],
            self.text_between(first, position),
            self.text_between(position, position + 1),
            self.text_between(position + 1, position + 1 + right),
        )

    def characters(self, position: int) -> tuple[int, int]:
        """Return where a position's token begins and ends in the text of its document."""
        return int(self.offsets[position]), int(self.offsets[position + 1])

    def position_at(self, number: int, character: int) -> int | None:
        """Return the position of the token that covers a character of a document's text; None beyond its end."""
        first, last = (int(start) for start in self.starts[number : number + 2])
        offsets = self.offsets[first:last]  # the last is the text's length
        if not 0 <= character < offsets[-1]:
            return None
        return first + max(0, int(np.searchsorted(offsets, character, side="right")) - 1)

    def document(self, number: int) -> tuple[str, list[int]]:
        """Return the text of a document, and the character at which each token begins, then where the last one ends."""
        begin, end = self.starts[number : number + 2].tolist()
        return self.documents[number].text, self.offsets[begin:end].tolist()

    def text_between(self, first: int, last: int) -> str:
        """Return the text of the tokens first..last-1, cut at the end of the document of `first`."""
        number = int(self.document_of(first))
        last = min(last, int(self.starts[number + 1]) - 1)
        return self.documents[number].text[self.offsets[first] : self.offsets[last]]


def split_files(artifact: Artifact, split: str) -> Sequence[ArtifactFiles]:
    """Return the files of a split: those of each part for train, files of the artifact itself for valid and test."""
    if split == "train":
        return [ArtifactFiles(part) for part in artifact.parts]
    return [ArtifactFiles(artifact, f"{split}.")]


class Stream(TokenStream):
    """Documents laid end to end: a split of a corpus, read through all its segments."""

    def __init__(self, corpus: Artifact, split: str, texts: Sequence[ArtifactFiles] | None = None) -> None:
        """`texts` are the files of each segment, if not those that the corpus has for the split."""
        self.split = split
        self._corpus = corpus
        self._texts = tuple(split_files(corpus, split) if texts is None else texts)
        assert self._texts, f"no text of {split} in {corpus.path}"
        self.tokens = concatenate([text.array("tokens.npy") for text in self._texts])
        starts = [text.array("starts.npy") for text in self._texts]
        self.bases = np.cumsum([0, *(int(each[-1]) for each in starts)])  # where each segment begins, and the end
        moved = [each[:-1] + base for each, base in zip(starts, self.bases.tolist(), strict=False)]
        self.starts: npt.NDArray[np.int64] = (
            np.asarray(starts[0]) if len(starts) == 1 else np.concatenate([*moved, self.bases[-1:]])
        )

    @cached_property
    def segments(self) -> tuple[Stream, ...]:
        """Each segment as a stream of its own; a stream of one segment is that segment."""
        if len(self._texts) == 1:
            return (self,)
        return tuple(Stream(self._corpus, self.split, [text]) for text in self._texts)

    @property
    def fingerprint(self) -> str:
        """Identifies the files of a single segment."""
        (text,) = self._texts
        return text.artifact.fingerprint

    @cached_property
    def documents(self) -> Sequence[Document]:
        return StreamDocuments(self._texts)

    @cached_property
    def offsets(self) -> npt.NDArray[Any]:
        return concatenate([text.array("offsets.npy") for text in self._texts])

    @cached_property
    def names(self) -> list[str]:
        """The name of each document, read without the texts."""
        return [name for text in self._texts for name in json.loads(text.artifact.text(f"{text.prefix}names.json"))]

    def tokenized(self, number: int) -> TokenizedDocument:
        """Return a document as it was tokenized."""
        begin, end = self.starts[number : number + 2].tolist()
        document = self.documents[number]
        offsets = self.offsets[begin : end - 1].tolist()
        return TokenizedDocument(document.name, document.text, self.tokens[begin : end - 1].tolist(), offsets)
