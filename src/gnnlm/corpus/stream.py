"""Token streams: documents laid end to end, with one position per token and one more at the end of each document.

The position after a document's last token has no token (`END`); its state is the one that has read the whole document.
Positions, store rows, index ids and neighbour nodes share one numbering.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from gnnlm.artifact import Artifact, Draft
from gnnlm.errors import CorpusError

END = -1
SURROGATES = "surrogatepass"  # bytes of enwik8 that are not UTF-8 are half surrogate pairs in its text
LONGEST = 2**31 - 1  # characters of a document: offsets are 32-bit numbers
SPLITS = ("train", "valid", "test")
Tokenize = Callable[[str], tuple[list[int], list[int]]]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest signed type that holds every id and END.

    >>> token_dtype(32768), token_dtype(49152)
    (dtype('int16'), dtype('int32'))
    """
    return np.dtype(np.int16 if vocab_size <= 2**15 else np.int32 if vocab_size <= 2**31 else np.int64)


@dataclass(frozen=True)
class TokenizedDocument:
    """A document with its token ids and the offset in the text at which each token starts."""

    name: str
    text: str
    tokens: list[int]
    offsets: list[int]

    @classmethod
    def make(cls, name: str, text: str, tokenize: Tokenize, limit: int | None) -> TokenizedDocument:
        tokens, offsets = tokenize(text)
        if limit is not None and len(tokens) > limit:
            text = text[: offsets[limit]]
            tokens, offsets = tokens[:limit], offsets[:limit]
        return cls(name, text, tokens, offsets)


@dataclass(frozen=True)
class Passage:
    """A token in its context: its document, the text before it, the token itself, the text after it."""

    document: str
    before: str
    token: str
    after: str


class SplitWriter:
    """Writes one split of a corpus, document by document."""

    def __init__(self, draft: Draft, split: str, vocab_size: int) -> None:
        self._draft, self._split, self._dtype = draft, split, token_dtype(vocab_size)
        self._tokens, self._offsets, self._starts = array("i"), array("i"), array("q", [0])
        self._lines, self._names = array("q", [0]), list[str]()
        self._file = draft.file(f"{split}.documents.jsonl").open("wb")
        self.documents = self.bytes = self.words = 0

    @property
    def tokens(self) -> int:
        return len(self._tokens) - self.documents

    def add(self, document: TokenizedDocument) -> None:
        if len(document.text) > LONGEST:
            raise CorpusError(
                f"{document.name} has {len(document.text):,} characters; expected at most {LONGEST:,} in a document: "
                "cut it with corpus.max_document_tokens, split the file, or set corpus.documents to lines"
            )
        self._tokens.extend(document.tokens)
        self._tokens.append(END)
        self._offsets.extend(document.offsets)
        self._offsets.append(len(document.text))
        self._starts.append(len(self._tokens))
        line = json.dumps({"name": document.name, "text": document.text}, ensure_ascii=False) + "\n"
        self._file.write(line.encode("utf-8", SURROGATES))
        self._lines.append(self._file.tell())
        self._names.append(document.name)
        self.documents += 1
        self.bytes += len(document.text.encode("utf-8", "surrogateescape"))
        self.words += len(document.text.split())

    def finish(self) -> dict[str, int]:
        """Close the split and return its counts."""
        self._file.close()
        self._draft.save(f"{self._split}.tokens.npy", np.asarray(self._tokens, dtype=self._dtype))
        self._draft.save(f"{self._split}.offsets.npy", np.asarray(self._offsets, dtype=np.int32))
        self._draft.save(f"{self._split}.starts.npy", np.asarray(self._starts, dtype=np.int64))
        self._draft.save(f"{self._split}.lines.npy", np.asarray(self._lines, dtype=np.int64))
        self._draft.write_text(f"{self._split}.names.json", json.dumps(self._names))
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "whitespace_words": self.words,
        }


class Documents(Sequence[dict[str, str]]):
    """Name and text of each document of a split; a document is read when it is asked for."""

    def __init__(self, file: Path, lines: npt.NDArray[np.int64]) -> None:
        self._file, self._lines = file, lines
        self._read = lru_cache(maxsize=64)(self._read_line)

    def __len__(self) -> int:
        return len(self._lines) - 1

    @overload
    def __getitem__(self, number: int) -> dict[str, str]: ...

    @overload
    def __getitem__(self, number: slice) -> list[dict[str, str]]: ...

    def __getitem__(self, number: int | slice) -> dict[str, str] | list[dict[str, str]]:
        places = range(len(self))[number]
        return self._read(places) if isinstance(places, int) else [self._read(place) for place in places]

    def _read_line(self, number: int) -> dict[str, str]:
        begin, end = self._lines[number : number + 2].tolist()
        with self._file.open("rb") as file:
            file.seek(begin)
            document: dict[str, str] = json.loads(file.read(end - begin).decode("utf-8", SURROGATES))
        return document


class Stream:
    """One split of a corpus artifact."""

    def __init__(self, corpus: Artifact, split: str) -> None:
        self.split = split
        self.tokens: npt.NDArray[Any] = corpus.array(f"{split}.tokens.npy")
        self.starts: npt.NDArray[np.int64] = np.asarray(corpus.array(f"{split}.starts.npy"))
        self._offsets = corpus.array(f"{split}.offsets.npy")
        self._corpus = corpus
        self.documents = Documents(corpus.file(f"{split}.documents.jsonl"), corpus.array(f"{split}.lines.npy"))

    @cached_property
    def names(self) -> list[str]:
        """The name of each document, read without the texts."""
        names: list[str] = json.loads(self._corpus.text(f"{self.split}.names.json"))
        return names

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def token_count(self) -> int:
        """The number of tokens, without the position at the end of each document."""
        return len(self.tokens) - (len(self.starts) - 1)

    def text(self) -> npt.NDArray[np.int64]:
        """All tokens, one document after another."""
        tokens = np.asarray(self.tokens, dtype=np.int64)
        text: npt.NDArray[np.int64] = tokens[tokens != END]
        return text

    def places(self) -> npt.NDArray[np.int64]:
        """The offset of each position when all documents are read as one text, without the ends of documents."""
        return np.arange(len(self)) - np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def document_of(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The number of the document of each position."""
        found: npt.NDArray[np.int64] = np.searchsorted(self.starts, positions, side="right") - 1
        return found

    def passage(self, position: int, left: int, right: int) -> Passage:
        """The token at a position with `left` tokens before it and `right` after it, within its document."""
        number = int(self.document_of(position))
        first = max(int(self.starts[number]), position - left)
        return Passage(
            self.names[number],
            self.text_between(first, position),
            self.text_between(position, position + 1),
            self.text_between(position + 1, position + 1 + right),
        )

    def characters(self, position: int) -> tuple[int, int]:
        """Where a position's token begins and ends in the text of its document."""
        return int(self._offsets[position]), int(self._offsets[position + 1])

    def text_between(self, first: int, last: int) -> str:
        """The text of the tokens first..last-1, cut at the end of the document of `first`."""
        number = int(self.document_of(first))
        last = min(last, int(self.starts[number + 1]) - 1)
        return self.documents[number]["text"][self._offsets[first] : self._offsets[last]]
