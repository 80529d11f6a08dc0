"""Which documents of a store may be looked up: names and globs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from gnnlm.errors import CorpusError

Names = str | Iterable[str] | None


def open_documents(names: Sequence[str], only: Names = None, exclude: Names = None) -> list[int]:
    """The numbers of the documents that a filter leaves open.

    >>> open_documents(["a.txt", "b.txt", "c.md"], only="*.txt", exclude="b.txt")
    [0]
    """
    numbers = set(range(len(names))) if only is None else _matching(names, only)
    return sorted(numbers - (set() if exclude is None else _matching(names, exclude)))


def _matching(names: Sequence[str], patterns: Names) -> set[int]:
    found: set[int] = set()
    for pattern in [patterns] if isinstance(patterns, str) else list(patterns or ()):
        if not isinstance(pattern, str):
            raise CorpusError(f"expected document names or globs, as strings; got {type(pattern).__name__}")
        here = {number for number, name in enumerate(names) if name == pattern}
        here = here or {number for number, name in enumerate(names) if fnmatchcase(name, pattern)}
        if not here:
            raise CorpusError(
                f"no document of the store is named {pattern!r} or matches it; book.documents lists the names"
            )
        found |= here
    return found
