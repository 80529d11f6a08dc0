"""The record of a generation: its segments, what is removed from each, tags, and what it was made with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gnnlm.artifact import ADDED, fingerprint
from gnnlm.errors import ArtifactError

FORMAT = 1


@dataclass(frozen=True)
class Segment:
    """A segment of a generation.

    `name` is its path in the run directory, `parts` has the fingerprint of each of its parts by kind. The numbers of
    its documents count from its first: of those removed, of those with each tag, and of those that overlap with text
    that the run is evaluated on.

    >>> Segment("added/0001.0", {}, documents=3, positions=9, removed=(1,)).live
    2
    """

    name: str
    parts: Mapping[str, str]
    documents: int
    positions: int
    removed: tuple[int, ...] = ()
    removed_positions: int = 0
    tags: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    overlapping: tuple[int, ...] = ()

    @property
    def live(self) -> int:
        """How many of its documents are not removed."""
        return self.documents - len(self.removed)

    @property
    def rows(self) -> int:
        """How many positions with a token its live documents have."""
        return self.positions - self.documents - (self.removed_positions - len(self.removed))

    @property
    def is_added(self) -> bool:
        """Whether it was made after the run was built."""
        return Path(self.name).parts[0] == ADDED

    def without(self, numbers: Sequence[int], positions: int) -> Segment:
        """The segment with more documents removed, which have this many positions."""
        removed = tuple(sorted({*self.removed, *numbers}))
        return replace(self, removed=removed, removed_positions=self.removed_positions + positions)


@dataclass(frozen=True)
class Generation:
    """What a run serves. `trained` has the fingerprints of the stages' artifacts that the segments were made with."""

    number: int = 0
    segments: tuple[Segment, ...] = ()
    trained: Mapping[str, str] = field(default_factory=dict)
    made: str = ""
    what: str = "run"
    added: int = 0
    removed: int = 0
    withdrawn: frozenset[str] = frozenset()  # what identifies the names of all documents that were ever removed

    @property
    def documents(self) -> int:
        return sum(segment.live for segment in self.segments)

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    def summary(self) -> dict[str, Any]:
        """A line of the history: when it was made, by what, and what came and went."""
        return {
            "generation": self.number,
            "made": self.made,
            "by": self.what,
            "added": self.added,
            "removed": self.removed,
            "documents": self.documents,
            "rows": self.rows,
            "segments": len(self.segments),
        }

    def as_json(self) -> dict[str, Any]:
        segments = [
            {
                "name": segment.name,
                "parts": dict(segment.parts),
                "documents": segment.documents,
                "positions": segment.positions,
                "removed": list(segment.removed),
                "removed_positions": segment.removed_positions,
                "tags": {tag: list(numbers) for tag, numbers in segment.tags.items()},
                "overlapping": list(segment.overlapping),
            }
            for segment in self.segments
        ]
        record = {
            "format": FORMAT,
            "generation": self.number,
            "what": self.what,
            "made": self.made,
            "added": self.added,
            "removed": self.removed,
            "trained": dict(self.trained),
            "withdrawn": sorted(self.withdrawn),
            "segments": segments,
        }
        return {**record, "checksum": fingerprint(record)}

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Generation:
        """The generation that a file holds; refused if it is damaged or of another format."""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("format"), int) and record["format"] != FORMAT:
            raise ArtifactError(
                f"{path} was made by another version of gnnlm (format {record['format']}, this version reads "
                f"{FORMAT}); use that version"
            )
        if not isinstance(record, dict) or record.pop("checksum", None) != fingerprint(record):
            raise ArtifactError(
                f"{path} is damaged (it was changed after it was written); put back a copy of it, or write the number "
                "of an earlier generation into CURRENT"
            )
        segments = tuple(
            Segment(
                each["name"],
                each["parts"],
                each["documents"],
                each["positions"],
                tuple(each["removed"]),
                each["removed_positions"],
                {tag: tuple(numbers) for tag, numbers in each["tags"].items()},
                tuple(each["overlapping"]),
            )
            for each in record["segments"]
        )
        return cls(
            record["generation"],
            segments,
            record["trained"],
            record["made"],
            record["what"],
            record["added"],
            record["removed"],
            frozenset(record["withdrawn"]),
        )
