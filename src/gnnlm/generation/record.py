"""The record of a generation: its segments, what is removed from each, tags, and what it was made with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gnnlm.artifact import fingerprint
from gnnlm.artifact.json_record import unsealed
from gnnlm.errors import ArtifactError
from gnnlm.layout import ADDED, REFITTED, SEGMENTS

FORMAT = 1


@dataclass(frozen=True)
class Segment:
    """A segment of a generation.

    `name` is its path in the run directory, `parts` has the fingerprint of each of its parts by kind. The numbers of
    its documents count from its first: of those removed, of those with each tag, and of those that overlap with text
    that the run is evaluated on. `places` has the paths of the parts that a refit has made for it, elsewhere in the run
    directory; `unseen` are the documents that the graph network was not trained with.

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
    places: Mapping[str, str] = field(default_factory=dict)
    unseen: tuple[int, ...] = ()

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

    def path_of(self, kind: str) -> str:
        """Where a part of it lies in the run directory.

        >>> one = Segment("segments/0000", {}, 1, 2, places={"index": "refitted/0003/segments/0000/index"})
        >>> one.path_of("text"), one.path_of("index")
        ('segments/0000/text', 'refitted/0003/segments/0000/index')
        """
        return self.places.get(kind, f"{self.name}/{kind}")

    def without(self, numbers: Sequence[int], positions: int) -> Segment:
        """The segment with more documents removed, which have this many positions."""
        removed = tuple(sorted({*self.removed, *numbers}))
        return replace(self, removed=removed, removed_positions=self.removed_positions + positions)


@dataclass(frozen=True)
class Refitted:
    """An artifact that a generation has in place of a stage's: its path in the run directory, and its fingerprint."""

    path: str
    fingerprint: str


@dataclass(frozen=True)
class Generation:
    """What a run serves.

    `trained` has the fingerprints of the stages' artifacts that it goes back to: if one is rebuilt, it no longer
    fits. `refitted` has what it serves in their place, by stage.
    """

    number: int = 0
    segments: tuple[Segment, ...] = ()
    trained: Mapping[str, str] = field(default_factory=dict)
    made: str = ""
    what: str = "run"
    added: int = 0
    removed: int = 0
    withdrawn: frozenset[str] = frozenset()  # what identifies the names of all documents that were ever removed
    refitted: Mapping[str, Refitted] = field(default_factory=dict)

    @property
    def paths(self) -> set[str]:
        """Where its parts and what was refitted for it lie in the run directory."""
        parts = {segment.path_of(kind) for segment in self.segments for kind in segment.parts}
        return parts | {each.path for each in self.refitted.values()}

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
                "places": dict(segment.places),
                "unseen": list(segment.unseen),
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
            "refitted": {
                name: {"path": each.path, "fingerprint": each.fingerprint} for name, each in self.refitted.items()
            },
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
        if not _is_whole(record):
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
                each.get("places", {}),
                tuple(each.get("unseen", ())),
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
            {name: Refitted(**each) for name, each in record.get("refitted", {}).items()},
        )


KINDS = {"format": int, "generation": int, "what": str, "made": str, "added": int, "removed": int, "trained": dict,
         "withdrawn": list, "segments": list, "refitted": dict}  # fmt: skip
SEGMENT_KINDS = {"name": str, "parts": dict, "documents": int, "positions": int, "removed": list,
                 "removed_positions": int, "tags": dict, "overlapping": list}  # fmt: skip


def _is_whole(record: object) -> bool:
    """Whether this is a record with the checksum that it was given, and with everything that readers rely on."""
    rest = unsealed(record)
    return (
        rest is not None
        and _has({"refitted": {}, **rest}, KINDS)
        and _all(rest["withdrawn"], str)
        and all(map(_is_segment, rest["segments"]))
        and all(map(_is_refit, rest.get("refitted", {}).values()))
    )


def _is_segment(each: object) -> bool:
    if not isinstance(each, dict) or not _has(each, SEGMENT_KINDS):
        return False
    place, tags = Path(each["name"]), each["tags"].values()
    places, unseen = each.get("places", {}), each.get("unseen", [])
    return (
        len(place.parts) == 2
        and place.parts[0] in (SEGMENTS, ADDED)
        and place.parts[1] != ".."
        and _all(each["parts"].values(), str)
        and all(isinstance(numbers, list) for numbers in tags)
        and isinstance(unseen, list)
        and all(_all(numbers, int) for numbers in (each["removed"], each["overlapping"], unseen, *tags))
        and isinstance(places, dict)
        and all(map(_is_below_refits, places.values()))
    )


def _is_refit(each: object) -> bool:
    kinds = {"path": str, "fingerprint": str}
    return (
        isinstance(each, dict) and each.keys() == kinds.keys() and _has(each, kinds) and _is_below_refits(each["path"])
    )


def _is_below_refits(path: object) -> bool:
    """Whether this is the path of something in the folder of refits, and of nothing elsewhere."""
    parts = Path(path).parts if isinstance(path, str) else ()
    return len(parts) > 2 and parts[0] == REFITTED and ".." not in parts


def _has(values: Mapping[str, object], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(values.get(name), kind) for name, kind in kinds.items())


def _all(values: Iterable[object], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)
