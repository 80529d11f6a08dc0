"""Writing token streams: a text of its own, or a split of a corpus."""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

import numpy as np

from gnnlm.artifact import Draft
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.corpus.stream import END, SURROGATES, TEXT
from gnnlm.errors import CorpusError
from gnnlm.layout import part_name

LONGEST = 2**31 - 1  # characters of a document: offsets are 32-bit numbers


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest signed type that holds every id and END.

    >>> token_dtype(32768), token_dtype(49152)
    (dtype('int16'), dtype('int32'))
    """
    if vocab_size <= 2**15:
        return np.dtype(np.int16)
    return np.dtype(np.int32 if vocab_size <= 2**31 else np.int64)


class TextWriter:
    """Collects documents, and writes them as the files of one text."""

    def __init__(self, vocab_size: int) -> None:
        self._dtype = token_dtype(vocab_size)
        self._tokens = array("i")
        self._offsets = array("i")
        self._starts = array("q", [0])
        self._lines = array("q", [0])
        self._names = list[str]()
        self._json = bytearray()

    def __len__(self) -> int:
        """Return the number of positions."""
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
        self._draft = draft
        self._split = split
        self._vocab_size = vocab_size
        self._segment = segment
        self._text = TextWriter(vocab_size)
        self._segments = 0
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
        self._text = TextWriter(self._vocab_size)
        self._segments += 1

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
