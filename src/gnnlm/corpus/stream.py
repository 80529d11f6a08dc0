"""Token streams: documents laid end to end, with one position per token and one more at the end of each document.

The position after a document's last token has no token (`END`); its state is the one that has read the whole document.
Positions, store rows, index ids and neighbour nodes share one numbering.

The text that is looked up is cut into segments of whole documents, each written and read by itself.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from gnnlm.artifact import Artifact, Draft, Files, joined
from gnnlm.errors import CorpusError
from gnnlm.layout import SEGMENTS

END = -1
TEXT = "text"  # the part of a segment that holds its documents
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
        whole = cls(name, text, *tokenize(text))
        return whole if limit is None else whole.cut(limit)

    def cut(self, limit: int) -> TokenizedDocument:
        """The document, or its beginning if it has more than `limit` tokens."""
        if len(self.tokens) <= limit:
            return self
        text = self.text[: self.offsets[limit]]
        return TokenizedDocument(self.name, text, self.tokens[:limit], self.offsets[:limit])


@dataclass(frozen=True)
class Passage:
    """A token in its context: its document, the text before it, the token itself, the text after it."""

    document: str
    before: str
    token: str
    after: str


class TextWriter:
    """Collects documents, and writes them as the files of one text."""

    def __init__(self, vocab_size: int) -> None:
        self._dtype = token_dtype(vocab_size)
        self._tokens, self._offsets, self._starts = array("i"), array("i"), array("q", [0])
        self._lines, self._names, self._json = array("q", [0]), list[str](), bytearray()

    def __len__(self) -> int:
        """The number of positions."""
        return len(self._tokens)

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
        self._json += line.encode("utf-8", SURROGATES)
        self._lines.append(len(self._json))
        self._names.append(document.name)

    @property
    def digest(self) -> str:
        """Identifies names, texts and tokens."""
        digest = hashlib.sha256(self._json)
        for values in (self._starts, self._tokens, self._offsets):
            digest.update(values)
        return digest.hexdigest()

    @property
    def inputs(self) -> dict[str, str]:
        """What a part that holds this text is made from."""
        return {"content": self.digest}

    def write_part(self, draft: Draft) -> dict[str, int]:
        """Write the text as a part of its own; returns its facts."""
        self.write(draft)
        return {"positions": len(self), "documents": len(self._names)}

    def write(self, draft: Draft, prefix: str = "") -> None:
        draft.write_bytes(f"{prefix}documents.jsonl", self._json)
        draft.save(f"{prefix}tokens.npy", np.asarray(self._tokens, dtype=self._dtype))
        draft.save(f"{prefix}offsets.npy", np.asarray(self._offsets, dtype=np.int32))
        draft.save(f"{prefix}starts.npy", np.asarray(self._starts, dtype=np.int64))
        draft.save(f"{prefix}lines.npy", np.asarray(self._lines, dtype=np.int64))
        draft.write_text(f"{prefix}names.json", json.dumps(self._names))


class SplitWriter:
    """Writes one split of a corpus, document by document: as files of the corpus itself, or as segments.

    A segment has at most `segment` positions, unless it is a single longer document. It is a part of the corpus, and is
    written when the next document does not fit into it, so that no more than one is held in memory.
    """

    def __init__(self, draft: Draft, split: str, vocab_size: int, segment: int | None = None) -> None:
        self._draft, self._split, self._vocab_size, self._segment = draft, split, vocab_size, segment
        self._text, self._segments = TextWriter(vocab_size), 0
        self.documents = self.tokens = self.bytes = self.words = 0

    def add(self, document: TokenizedDocument) -> None:
        full = self._segment is not None and len(self._text) + len(document.tokens) + 1 > self._segment
        if full and len(self._text):
            self._write_segment()
        self._text.add(document)
        self.documents += 1
        self.tokens += len(document.tokens)
        self.bytes += len(document.text.encode("utf-8", "surrogateescape"))
        self.words += len(document.text.split())

    def _write_segment(self) -> None:
        self._draft.part(part_name(self._segments, TEXT), self._text.inputs, self._text.write_part)
        self._text, self._segments = TextWriter(self._vocab_size), self._segments + 1

    def finish(self) -> dict[str, int]:
        """Write what is left and return the counts of the split."""
        if self._segment is None:
            self._text.write(self._draft, f"{self._split}.")
        else:
            self._write_segment()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "whitespace_words": self.words,
        }


def part_name(number: int, kind: str) -> str:
    """Where a part of a segment lies in the run directory.

    >>> part_name(3, "states")
    'segments/0003/states'
    """
    return f"{SEGMENTS}/{number:04d}/{kind}"


class Listed(Sequence[dict[str, str]], ABC):
    """Names and texts of documents, by number or slice."""

    @overload
    def __getitem__(self, number: int) -> dict[str, str]: ...

    @overload
    def __getitem__(self, number: slice) -> list[dict[str, str]]: ...

    def __getitem__(self, number: int | slice) -> dict[str, str] | list[dict[str, str]]:
        places = range(len(self))[number]
        return self._read(places) if isinstance(places, int) else [self._read(place) for place in places]

    @abstractmethod
    def _read(self, place: int) -> dict[str, str]: ...


class Documents(Listed):
    """Name and text of each document of a segment; a document is read when it is asked for."""

    def __init__(self, text: Files) -> None:
        self._file, self._lines = text.artifact.file(f"{text.prefix}documents.jsonl"), text.array("lines.npy")
        self._kept = lru_cache(maxsize=64)(self._read_line)

    def __len__(self) -> int:
        return len(self._lines) - 1

    def _read(self, place: int) -> dict[str, str]:
        return self._kept(place)

    def _read_line(self, number: int) -> dict[str, str]:
        begin, end = self._lines[number : number + 2].tolist()
        with self._file.open("rb") as file:
            file.seek(begin)
            document: dict[str, str] = json.loads(file.read(end - begin).decode("utf-8", SURROGATES))
        return document


class JoinedDocuments(Listed):
    """The documents of several segments, one after the other."""

    def __init__(self, parts: Sequence[Documents]) -> None:
        self._parts, self._bases = parts, np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._bases[-1])

    def _read(self, place: int) -> dict[str, str]:
        part = int(np.searchsorted(self._bases, place, side="right")) - 1
        return self._parts[part][place - int(self._bases[part])]


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
    def documents(self) -> Sequence[dict[str, str]]:
        """Name and text of each document."""

    @property
    @abstractmethod
    def offsets(self) -> npt.NDArray[Any]:
        """The character at which each position's token begins; past a document's last token, the text's length."""

    def __len__(self) -> int:
        """The number of positions."""
        return len(self.tokens)

    @property
    def token_count(self) -> int:
        """The number of tokens, without the position at the end of each document."""
        return len(self.tokens) - (len(self.starts) - 1)

    def text(self, dtype: npt.DTypeLike | None = np.int64) -> npt.NDArray[Any]:
        """All tokens, one document after another; `None` leaves them in the type they are stored in."""
        tokens = np.asarray(self.tokens, dtype=dtype)
        text: npt.NDArray[Any] = tokens[tokens != END]
        return text

    def places(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.int64]:
        """The offset of each position when all documents are read as one text, without the ends of documents.

        Of the positions from `first` on, before `last`.
        """
        positions = np.arange(first, len(self) if last is None else last)
        return positions - self.document_of(positions)

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
        return int(self.offsets[position]), int(self.offsets[position + 1])

    def position_at(self, number: int, character: int) -> int | None:
        """The position of the token that covers a character of a document's text; None beyond its end."""
        first, last = (int(start) for start in self.starts[number : number + 2])
        offsets = self.offsets[first:last]  # the last is the text's length
        if not 0 <= character < offsets[-1]:
            return None
        return first + max(0, int(np.searchsorted(offsets, character, side="right")) - 1)

    def document(self, number: int) -> tuple[str, list[int]]:
        """The text of a document, and the character at which each token begins, then where the last one ends."""
        begin, end = self.starts[number : number + 2].tolist()
        return self.documents[number]["text"], self.offsets[begin:end].tolist()

    def text_between(self, first: int, last: int) -> str:
        """The text of the tokens first..last-1, cut at the end of the document of `first`."""
        number = int(self.document_of(first))
        last = min(last, int(self.starts[number + 1]) - 1)
        return self.documents[number]["text"][self.offsets[first] : self.offsets[last]]


def split_files(artifact: Artifact, split: str) -> Sequence[Files]:
    """What an artifact holds of a split: of train a part for each segment, of the others files of its own."""
    if split == "train":
        return [Files(part) for part in artifact.parts]
    return [Files(artifact, f"{split}.")]


class Stream(TokenStream):
    """Documents laid end to end: a split of a corpus, read through all its segments."""

    def __init__(self, corpus: Artifact, split: str, texts: Sequence[Files] | None = None) -> None:
        """`texts` are the files of each segment, if not those that the corpus has for the split."""
        self.split, self._corpus = split, corpus
        self._texts = tuple(split_files(corpus, split) if texts is None else texts)
        assert self._texts, f"no text of {split} in {corpus.path}"
        self.tokens = joined([text.array("tokens.npy") for text in self._texts])
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
    def documents(self) -> Sequence[dict[str, str]]:
        """Name and text of each document, read when it is asked for."""
        made = [Documents(text) for text in self._texts]
        return made[0] if len(made) == 1 else JoinedDocuments(made)

    @cached_property
    def offsets(self) -> npt.NDArray[Any]:
        return joined([text.array("offsets.npy") for text in self._texts])

    @cached_property
    def names(self) -> list[str]:
        """The name of each document, read without the texts."""
        return [name for text in self._texts for name in json.loads(text.artifact.text(f"{text.prefix}names.json"))]

    def tokenized(self, number: int) -> TokenizedDocument:
        """A document as it was tokenized."""
        begin, end = self.starts[number : number + 2].tolist()
        document, offsets = self.documents[number], self.offsets[begin : end - 1].tolist()
        return TokenizedDocument(document["name"], document["text"], self.tokens[begin : end - 1].tolist(), offsets)
