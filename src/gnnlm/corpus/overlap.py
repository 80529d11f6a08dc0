"""Text that appears in more than one split, found by word n-grams and removed from the later split.

Knows nothing of tokens: a word here is a run of letters, digits and underscores, in lower case.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

WORD = re.compile(r"\w+")
BREAK = re.compile(r"\n\s*\n")
Hashes = npt.NDArray[np.uint64]


def paragraphs(text: str) -> list[str]:
    """
    >>> paragraphs("one\\ntwo\\n\\n  \\nthree\\n")
    ['one\\ntwo', 'three']
    """
    return [p.strip("\n") for p in BREAK.split(text) if p.strip()]


class NgramHasher:
    """Turns text into one 64-bit hash per word n-gram."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._words: dict[str, int] = {}

    def __call__(self, text: str) -> Hashes:
        words = np.fromiter((self._word(w) for w in WORD.findall(text.lower())), dtype=np.uint64)
        count = len(words) - self.n + 1
        hashes = np.zeros(max(count, 0), dtype=np.uint64)
        for offset in range(self.n if count > 0 else 0):
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + count]
            hashes ^= hashes >> np.uint64(29)
        return hashes

    def _word(self, word: str) -> int:
        known = self._words.get(word)
        if known is None:
            known = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
            self._words[word] = known
        return known


@dataclass
class Overlap:
    """How much of a split appears in earlier text, and how much still does after cleaning."""

    paragraphs: int = 0
    repeated_paragraphs: int = 0
    words: int = 0
    repeated_words: int = 0
    ngrams: int = 0
    shared_ngrams: int = 0
    documents_emptied: int = 0
    kept_words: int = 0
    short_repeats: int = 0  # words of kept paragraphs that are too short for an n-gram and appear in earlier text

    def facts(self) -> dict[str, float | int]:
        return {
            "paragraphs": self.paragraphs,
            "repeated_paragraphs": self.repeated_paragraphs,
            "words": self.words,
            "repeated_words": self.repeated_words,
            "documents_emptied": self.documents_emptied,
            "remaining_ngram_overlap": self.shared_ngrams / self.ngrams if self.ngrams else 0.0,
            "remaining_short_overlap": self.short_repeats / self.kept_words if self.kept_words else 0.0,
        }


@dataclass
class SeenText:
    """The n-grams of the text that is already in a split."""

    n: int
    hashes: set[int] = field(default_factory=set)
    short: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.hasher = NgramHasher(self.n)

    def add(self, text: str) -> None:
        self.hashes.update(self.hasher(text).tolist())
        self.short.update(words for _, words in self._short_paragraphs(text))

    def count(self, text: str, overlap: Overlap) -> None:
        """Add to the overlap how much of a kept text appears in earlier text nevertheless."""
        shared, total = self.shared(text)
        overlap.shared_ngrams += shared
        overlap.ngrams += total
        overlap.kept_words += len(WORD.findall(text))
        overlap.short_repeats += sum(count for count, words in self._short_paragraphs(text) if words in self.short)

    def _short_paragraphs(self, text: str) -> list[tuple[int, str]]:
        """Return the number of words and the words of each paragraph that is too short for an n-gram."""
        found = [WORD.findall(paragraph.lower()) for paragraph in paragraphs(text)]
        return [(len(words), " ".join(words)) for words in found if 0 < len(words) < self.n]

    def shared(self, text: str) -> tuple[int, int]:
        """Return how many n-grams of the text have been seen, and how many there are."""
        hashes = self.hasher(text).tolist()
        return sum(h in self.hashes for h in hashes), len(hashes)

    def clean(self, text: str, limit: float, overlap: Overlap) -> str:
        """Return the text without the paragraphs of which at least a share of `limit` has been seen.

        A paragraph with fewer than n words has no n-gram and is kept.
        """
        kept = []
        for paragraph in paragraphs(text):
            shared, total = self.shared(paragraph)
            words = len(WORD.findall(paragraph))
            overlap.paragraphs += 1
            overlap.words += words
            if total and shared >= limit * total:
                overlap.repeated_paragraphs += 1
                overlap.repeated_words += words
            else:
                kept.append(paragraph)
        if len(kept) == len(paragraphs(text)):
            return text
        return "\n\n".join(kept)
