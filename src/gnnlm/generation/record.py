"""The record of a generation: its segments, what is removed from each, tags, and what it was made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter

from gnnlm.artifact.json_record import parse_json, plain, sealed
from gnnlm.errors import ArtifactError
from gnnlm.layout import ADDED, REFITTED, SEGMENTS

FORMAT = 1


def _segment_name(name: str) -> str:
    parts = Path(name).parts
    if len(parts) != 2 or parts[0] not in (SEGMENTS, ADDED) or parts[1] == "..":
        raise ValueError("expected the folder of a segment")
    return name


def _path_of_a_refit(path: str) -> str:
    parts = Path(path).parts
    if len(parts) < 3 or parts[0] != REFITTED or ".." in parts:
        raise ValueError("expected a path in the folder of a refit")
    return path


RefitPath = Annotated[str, AfterValidator(_path_of_a_refit)]


@dataclass(frozen=True)
class SegmentRecord:
    """A segment of a generation.

    `name` is its path in the run directory, `parts` has the fingerprint of each of its parts by kind. Documents are
    numbered from the segment's first: `removed` ones, those with each tag, and those `overlapping` with text that the
    run is evaluated on. `places` has the paths of parts that a refit has made, elsewhere in the run directory; `unseen`
    are the documents that the graph network was not trained with.

    >>> SegmentRecord("added/0001.0", {}, documents=3, positions=9, removed=(1,)).live
    2
    """

    name: Annotated[str, AfterValidator(_segment_name)]
    parts: Mapping[str, str]
    documents: int
    positions: int
    removed: tuple[int, ...] = ()
    removed_positions: int = 0
    tags: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    overlapping: tuple[int, ...] = ()
    places: Mapping[str, RefitPath] = field(default_factory=dict)
    unseen: tuple[int, ...] = ()

    @property
    def live(self) -> int:
        """The number of documents that are not removed."""
        return self.documents - len(self.removed)

    @property
    def rows(self) -> int:
        """The number of positions with a token in live documents."""
        return self.positions - self.documents - (self.removed_positions - len(self.removed))

    @property
    def is_added(self) -> bool:
        """Whether it was made after the run was built."""
        return Path(self.name).parts[0] == ADDED

    def path_of(self, kind: str) -> str:
        """Return where a part lies in the run directory.

        >>> one = SegmentRecord("segments/0000", {}, 1, 2, places={"index": "refitted/0003/segments/0000/index"})
        >>> one.path_of("text"), one.path_of("index")
        ('segments/0000/text', 'refitted/0003/segments/0000/index')
        """
        return self.places.get(kind, f"{self.name}/{kind}")

    def without(self, numbers: Sequence[int], positions: int) -> SegmentRecord:
        """Return the segment with more documents removed, which have this many positions."""
        removed = tuple(sorted({*self.removed, *numbers}))
        return replace(self, removed=removed, removed_positions=self.removed_positions + positions)


@dataclass(frozen=True)
class RefittedArtifact:
    """An artifact that a generation has in place of a stage's: its path in the run directory, and its fingerprint."""

    path: RefitPath
    fingerprint: str


@dataclass(frozen=True)
class Generation:
    """What a run serves.

    `trained` has the fingerprints of the stages' artifacts that it was made with: if one of them is rebuilt, the
    generation no longer fits. `refitted` has what is served in their place, by stage. `withdrawn` identifies the names
    of all documents that were ever removed.
    """

    number: Annotated[int, Field(alias="generation")] = 0
    segments: tuple[SegmentRecord, ...] = ()
    trained: Mapping[str, str] = field(default_factory=dict)
    made: str = ""
    what: str = "run"
    added: int = 0
    removed: int = 0
    withdrawn: frozenset[str] = frozenset()
    refitted: Mapping[str, RefittedArtifact] = field(default_factory=dict)

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
        """Return a line of the history: when it was made, by what, and what was added and removed."""
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
        """Return the record as it is stored, with its checksum."""
        record = RECORD.dump_python(self, by_alias=True)
        return sealed(plain({"format": FORMAT, **record, "withdrawn": sorted(self.withdrawn)}))

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Generation:
        """Return the generation in a file's text; refuse a damaged one, and other formats."""
        record = parse_json(text)
        try:
            made = RECORD.validate_json(text, strict=True)
            if made.as_json() == record:
                return made
        except ValueError:  # pydantic's errors are ValueErrors
            pass
        found = record.get("format") if isinstance(record, dict) else None
        if isinstance(found, int) and found != FORMAT:
            raise ArtifactError(
                f"{path} was made by another version of gnnlm (format {found}, this version reads {FORMAT}); use that "
                "version"
            )
        raise ArtifactError(
            f"{path} is damaged (it was changed after it was written); put back a copy of it, or write the number of "
            "an earlier generation into CURRENT"
        )


RECORD = TypeAdapter(Generation)
