"""Vocabularies of models trained from scratch: words separated by spaces, or bytes.

A vocabulary turns text into ids and says where in the text each token starts. Words follow the published benchmarks:
every line ends in `<eos>`, and a word that is not in the vocabulary is `<unk>`. Ids are in order of frequency, the
most frequent first, as an adaptive softmax needs them.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gnnlm.artifact import disk
from gnnlm.errors import ModelError

EOS, UNK = "<eos>", "<unk>"
WORD = re.compile(r"[^ \t\n]+")
BYTE = re.compile(r"[0-9]{1,3}")
FILE = "vocabulary.txt"
NEWLINE = ord("\n")


class WordVocabulary:
    """Words separated by spaces, and `<eos>` at the end of every line."""

    kind = "words"

    def __init__(self, words: Sequence[str], eos: str = EOS, unk: str = UNK) -> None:
        self.words = list(words)
        self._eos = eos
        self._unk = unk
        missing = [word for word in (eos, unk) if word not in self._ids]
        if missing:
            raise ModelError(
                f"expected {eos} and {unk} in a vocabulary of words (it lacks {' and '.join(missing)}); make it again"
            )

    @classmethod
    def count(cls, texts: Iterable[str], min_count: int = 1) -> WordVocabulary:
        """Return the words that occur at least `min_count` times in some texts, by frequency, then by alphabet.

        >>> WordVocabulary.count(["a b a", "c"]).words
        ['<eos>', 'a', 'b', 'c', '<unk>']
        """
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(WORD.findall(text))
            counts[EOS] += text.count("\n") + 1
        rare = [word for word, count in counts.items() if count < min_count]
        counts[UNK] += sum(counts.pop(word) for word in rare)
        return cls(sorted(counts, key=lambda word: (-counts[word], word)))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    @property
    def start(self) -> int:
        """The token before the start of a text: the end of a line."""
        return self._ids[self._eos]

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """
        >>> WordVocabulary(["<eos>", "a", "b", "<unk>"]).tokenize("a b\\nc")
        ([1, 2, 0, 3, 0], [0, 2, 3, 4, 5])
        """
        ids = []
        offsets = []
        at = 0
        known = self._ids
        unknown = self._ids[self._unk]
        end = self._ids[self._eos]
        for line in text.split("\n"):
            for word in WORD.finditer(line):
                ids.append(known.get(word.group(), unknown))
                offsets.append(at + word.start())
            at += len(line)
            ids.append(end)
            offsets.append(at)
            at += 1
        return ids, offsets

    def piece(self, token: int) -> str:
        return self.words[token]

    def bytes_of(self, token: int) -> bytes:
        """Return the word, without the space that parts it from the next; a newline for the end of a line."""
        return b"\n" if self.words[token] == self._eos else self.words[token].encode("utf-8", "surrogateescape")

    def detokenize(self, ids: Sequence[int]) -> str:
        """
        >>> WordVocabulary(["<eos>", "a", "b", "<unk>"]).detokenize([1, 2, 0, 3, 0])
        'a b\\n<unk>'
        """
        lines: list[list[str]] = [[]]
        for word in (self.words[token] for token in ids):
            if word == self._eos:
                lines.append([])
            else:
                lines[-1].append(word)
        if len(lines) > 1 and not lines[-1]:
            lines.pop()  # the last line ends in a token too, but no newline follows it
        return "\n".join(" ".join(line) for line in lines)

    def save(self, folder: Path) -> None:
        lines = [f"{self.kind}\t{self._eos}\t{self._unk}", *self.words]
        # bytes that were not UTF-8 when the text was read go back as they were
        disk.write_file(folder / FILE, ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))


class ByteVocabulary:
    """The bytes that occur, each a token.

    The enwik8 of the original Transformer-XL has no newlines: a vocabulary without them skips them in text.
    """

    kind = "bytes"

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)
        self._ids: npt.NDArray[np.int64] = np.full(256, -1, dtype=np.int64)
        self._ids[self.values] = np.arange(len(self.values))
        self._has_newlines = self._ids[NEWLINE] >= 0

    @classmethod
    def count(cls, texts: Iterable[str]) -> ByteVocabulary:
        counts: npt.NDArray[np.int64] = np.zeros(256, dtype=np.int64)
        for text in texts:
            counts += np.bincount(as_bytes(text), minlength=256)
        counts[NEWLINE] += 1  # the token before the start of every text
        return cls([int(value) for value in np.argsort(-counts, kind="stable") if counts[value]])

    def __len__(self) -> int:
        return len(self.values)

    @property
    def start(self) -> int:
        """The token before the start of a text: a newline, or a space in a vocabulary without newlines."""
        return max(0, int(self._ids[NEWLINE] if self._has_newlines else self._ids[ord(" ")]))

    def tokenize(self, text: str) -> tuple[list[int], list[int]]:
        """
        >>> ByteVocabulary([10, 97, 195, 169]).tokenize("a\\u00e9a")
        ([1, 2, 3, 1], [0, 1, 1, 2])
        """
        values = as_bytes(text)
        offsets = byte_offsets(text)
        if not self._has_newlines:
            values, offsets = values[values != NEWLINE], offsets[values != NEWLINE]
        ids = self._ids[values]
        if len(ids) and ids.min() < 0:
            value = int(values[int(np.argmin(ids))])
            raise ModelError(
                f"byte 0x{value:02x} is not in this model's vocabulary of {len(self)} bytes; remove it from the text"
            )
        return ids.tolist(), offsets.tolist()

    def piece(self, token: int) -> str:
        return visible(self.bytes_of(token))

    def bytes_of(self, token: int) -> bytes:
        return bytes([self.values[token]])

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(self.values[token] for token in ids).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        lines = [self.kind, *(str(value) for value in self.values)]
        disk.write_file(folder / FILE, ("\n".join(lines) + "\n").encode())


Vocabulary = WordVocabulary | ByteVocabulary


def cut_words(text: str, limit: int) -> str:
    """Return the first tokens of a text, line ends counted.

    >>> cut_words("a b\\nc d", 4)
    'a b\\nc'
    """
    kept: list[str] = []
    for line in text.split("\n"):
        words = WORD.findall(line)
        if len(words) >= limit:
            return "\n".join([*kept, " ".join(words[:limit])])
        kept.append(line)
        limit -= len(words) + 1
        if limit == 0:
            break
    return "\n".join(kept)


def load_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary in a folder; None if there is none."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        with file.open(encoding="utf-8", errors="surrogateescape", newline="\n") as opened:
            first, *lines = opened.read().removesuffix("\n").split("\n")
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}); check its permissions") from error
    kind, *special = first.split("\t")
    if kind == WordVocabulary.kind and len(special) == 2:
        return WordVocabulary(lines, *special)
    if kind == ByteVocabulary.kind and all(BYTE.fullmatch(line) and int(line) < 256 for line in lines):
        return ByteVocabulary([int(line) for line in lines])
    raise ModelError(
        f"{file}: expected a vocabulary that gnnlm wrote (its first line is {first[:40]!r}); make or convert it again"
    )


def visible(data: bytes) -> str:
    """Decode bytes; those that are only part of a character are written as escapes.

    >>> visible(b" \\xe2\\x82"), visible("\u20ac".encode())
    (' <0xE2><0x82>', '\u20ac')
    """
    return data.decode("utf-8", "gnnlm-visible")


def _write_out(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"<0x{value:02X}>" for value in error.object[error.start : error.end]), error.end


codecs.register_error("gnnlm-visible", _write_out)


def as_bytes(text: str) -> npt.NDArray[np.uint8]:
    """Encode a text; bytes that were not UTF-8 when the text was read are restored."""
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8)


def byte_offsets(text: str) -> npt.NDArray[np.int64]:
    """Return the character that each byte belongs to."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    escaped = (points >= 0xDC80) & (points <= 0xDCFF)
    lengths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.repeat(np.arange(len(points)), np.where(escaped, 1, lengths))
