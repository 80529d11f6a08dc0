"""Which documents of a store may be looked up: names, globs of names, and tags."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from gnnlm.errors import CorpusError

Names = str | Iterable[str] | None
TAG = "tag:"


def open_documents(
    names: Sequence[str],
    only: Names = None,
    exclude: Names = None,
    live: Collection[int] | None = None,
    tags: Mapping[str, Collection[int]] | None = None,
) -> list[int]:
    """Return the numbers of the documents that a filter leaves open.

    A filter names documents: by name, by a glob of names, or as `tag:T` for those with a tag that T names or matches. A
    document of exactly that name comes first. `live` has the documents that are there at all, if not every one is.

    >>> open_documents(["a.txt", "b.txt", "c.md"], only="*.txt", exclude="b.txt")
    [0]
    >>> open_documents(["a.txt", "b.txt"], only="tag:manual", tags={"manual": [1]})
    [1]
    """
    there = range(len(names)) if live is None else live
    listed = DocumentLookup({number: names[number] for number in there}, tags or {})
    numbers = set(there) if only is None else listed.matching(only)
    return sorted(numbers - (set() if exclude is None else listed.matching(exclude)))


class DocumentLookup:
    """The documents of a store by name and tag."""

    def __init__(self, names: Mapping[int, str], tags: Mapping[str, Collection[int]]) -> None:
        self._names = names
        self._tags = tags
        self._numbers: dict[str, set[int]] = {}
        for number, name in names.items():
            self._numbers.setdefault(name, set()).add(number)

    def matching(self, patterns: Names) -> set[int]:
        """Return the numbers of the documents that the patterns name; each must name some."""
        found: set[int] = set()
        for pattern in [patterns] if isinstance(patterns, str) else list(patterns or ()):
            if not isinstance(pattern, str):
                raise CorpusError(f"expected document names or globs, as strings; got {type(pattern).__name__}")
            here = self._numbers.get(pattern) or self._tagged(pattern) or self._like(pattern)
            if not here:
                raise CorpusError(
                    f"no document of the store is named {pattern!r} or matches it; book.documents lists the names"
                )
            found |= here
        return found

    def _like(self, pattern: str) -> set[int]:
        return {number for number, name in self._names.items() if fnmatchcase(name, pattern)}

    def _tagged(self, pattern: str) -> set[int]:
        if not pattern.startswith(TAG):
            return set()
        tag = pattern.removeprefix(TAG)
        tagged = (numbers for name, numbers in self._tags.items() if name == tag or fnmatchcase(name, tag))
        return {number for numbers in tagged for number in numbers if number in self._names}
