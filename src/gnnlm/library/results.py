"""The results of changes of the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CatalogueEntry:
    """A document that can be looked up: its name, tokens and tags, and the segment that holds it."""

    name: str
    tokens: int
    tags: tuple[str, ...]
    segment: str


@dataclass(frozen=True)
class Change:
    """A change: the generation that the run serves now, what came and went, and the rows that can be found.

    `overlapping` names the added documents that share text with the run's valid or test split.
    """

    generation: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    rows: int = 0
    seconds: float = 0.0
    overlapping: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "added": len(self.added),
            "removed": len(self.removed),
            "rows": self.rows,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Refit(Change):
    """The part that was fitted again, and its stages; no stages if the part was up to date."""

    part: str = ""
    stages: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "part": self.part, "stages": list(self.stages)}


@dataclass(frozen=True)
class ErasureChange(Change):
    """A compaction that erased documents: their names, and what is left of them anywhere.

    `found` names files of the run that still hold some of their text, tokens or states; nothing may be in it.
    `may_remember` names what was made from them and cannot be searched.
    """

    erased: tuple[str, ...] = ()
    searched: int = 0  # bytes of the run that were looked through
    found: tuple[str, ...] = ()
    may_remember: tuple[str, ...] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        more = {"erased": len(self.erased), "searched_bytes": self.searched, "found": list(self.found)}
        return {**super().as_json(), **more, "may_remember": list(self.may_remember)}
