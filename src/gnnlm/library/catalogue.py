"""The documents of a generation by name: where each is, and its text and tags."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from gnnlm.artifact import ArtifactFiles
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.corpus.stream import TEXT, Stream
from gnnlm.datastore.filter import DocumentLookup, Names
from gnnlm.generation import SegmentRecord
from gnnlm.library.results import CatalogueEntry
from gnnlm.run.snapshot import Snapshot

Place = tuple[int, int]  # a segment of a generation, and a document of it


class Catalogue:
    """The documents of a generation that are not removed."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot, self._now = snapshot, snapshot.generation

    @cached_property
    def streams(self) -> list[Stream]:
        """The text of each segment."""
        return [text_of(self._snapshot, segment) for segment in self._now.segments]

    @cached_property
    def places(self) -> dict[str, list[Place]]:
        """Where the documents of each name are; a corpus may have several of one name."""
        found: dict[str, list[Place]] = {}
        for number, (segment, stream) in enumerate(zip(self._now.segments, self.streams, strict=True)):
            removed = set(segment.removed)
            for document, name in enumerate(stream.names):
                if document not in removed:
                    found.setdefault(name, []).append((number, document))
        return found

    def entries(self) -> list[CatalogueEntry]:
        found = []
        for segment, stream in zip(self._now.segments, self.streams, strict=True):
            removed, tags = set(segment.removed), _tags_by_document(segment)
            sizes = (stream.starts[1:] - stream.starts[:-1] - 1).tolist()
            for number, name in enumerate(stream.names):
                if number not in removed:
                    found.append(CatalogueEntry(name, sizes[number], tuple(sorted(tags.get(number, ()))), segment.name))
        return found

    def name_of(self, place: Place) -> str:
        return self.streams[place[0]].names[place[1]]

    def differs(self, document: TokenizedDocument) -> bool:
        """Whether documents of this name are there, and none has this text."""
        there = self.places.get(document.name, ())
        return bool(there) and all(self.streams[s].documents[n].text != document.text for s, n in there)

    def matching(self, names: Names) -> list[Place]:
        """Return the documents that names, globs or tags select."""
        flat = [place for places in self.places.values() for place in places]
        tags: dict[str, list[int]] = {}
        for number, place in enumerate(flat):
            for tag in self.tags_at(place):
                tags.setdefault(tag, []).append(number)
        listed = DocumentLookup({number: self.name_of(place) for number, place in enumerate(flat)}, tags)
        return [flat[number] for number in sorted(listed.matching(names))]

    def tags_at(self, place: Place) -> set[str]:
        return self._tags[place[0]].get(place[1], set())

    @cached_property
    def _tags(self) -> list[dict[int, set[str]]]:
        return [_tags_by_document(segment) for segment in self._now.segments]

    def tagged(self, tag: str) -> list[Place]:
        """Return the documents that have a tag."""
        return [place for places in self.places.values() for place in places if tag in self.tags_at(place)]

    def without(self, gone: Iterable[Place]) -> list[SegmentRecord]:
        """Return the segments with some documents removed."""
        segments, by_segment = list(self._now.segments), dict[int, list[int]]()
        for number, document in gone:
            by_segment.setdefault(number, []).append(document)
        for number, documents in by_segment.items():
            starts = self.streams[number].starts
            positions = sum(int(starts[each + 1] - starts[each]) for each in documents)
            segments[number] = segments[number].without(documents, positions)
        return segments

    def tagged_as(self, segments: Sequence[SegmentRecord], tags: Mapping[str, Iterable[str]]) -> list[SegmentRecord]:
        """Return the segments with tags given to documents by name."""
        found = list(segments)
        for name, wanted in tags.items():
            found = self.tagged_with(found, self.places.get(name, ()), wanted)
        return found

    @staticmethod
    def tagged_with(
        segments: Sequence[SegmentRecord], places: Iterable[Place], tags: Iterable[str]
    ) -> list[SegmentRecord]:
        """Return the segments with tags given to some documents."""
        found, wanted = list(segments), sorted(tags)
        for number, document in places:
            segment = found[number]
            more = {tag: tuple(sorted({*segment.tags.get(tag, ()), document})) for tag in wanted}
            found[number] = replace(segment, tags={**segment.tags, **more})
        return found


def text_of(snapshot: Snapshot, segment: SegmentRecord) -> Stream:
    """Open the text of a segment; the other segments of the snapshot may be damaged."""
    text = snapshot.part(segment, TEXT)
    return Stream(text, "train", [ArtifactFiles(text)])


def name_digest(name: str) -> str:
    """Return a digest of a document's name, from which the name cannot be read."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _tags_by_document(segment: SegmentRecord) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for tag, numbers in segment.tags.items():
        for number in numbers:
            found.setdefault(number, set()).add(tag)
    return found
