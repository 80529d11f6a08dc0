"""Compaction: segments without the documents that were removed from them, and small segments as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnnlm.corpus.text_writer import TextWriter
from gnnlm.generation import SegmentRecord
from gnnlm.layout import ADDED
from gnnlm.library.catalogue import text_of
from gnnlm.library.segment_builder import CopiedRows, SegmentBuilder
from gnnlm.run.snapshot import Snapshot


@dataclass(frozen=True)
class SurvivingDocuments:
    """The documents of a segment that a compacted one copies."""

    segment: SegmentRecord
    documents: tuple[int, ...]


def compacted(snapshot: Snapshot, builder: SegmentBuilder, vocab_size: int) -> tuple[SegmentRecord, ...] | None:
    """Return the segments of the next generation, without removed documents; None if nothing changes.

    A segment that nothing was removed from is copied only where it joins others: added segments that lie beside each
    other, up to `store.segment_tokens` positions.
    """
    out: list[SegmentRecord] = []
    made, now = 0, snapshot.generation
    for group in _groups(now.segments, snapshot.config.store.segment_tokens):
        if len(group) == 1 and not group[0].removed:
            out.append(group[0])
            continue
        kept = [
            SurvivingDocuments(one, tuple(n for n in range(one.documents) if n not in set(one.removed)))
            for one in group
        ]
        kept = [one for one in kept if one.documents]
        if kept:
            out.append(_copy(snapshot, builder, vocab_size, f"{ADDED}/{now.number + 1:04d}.{made}", kept))
            made += 1
    return None if tuple(out) == now.segments else tuple(out)


def _groups(segments: Sequence[SegmentRecord], limit: int) -> list[list[SegmentRecord]]:
    """Group adjacent segments that are merged: those that were added or have removed documents, up to the limit."""
    groups: list[list[SegmentRecord]] = []
    size = 0
    for segment in segments:
        live = segment.positions - segment.removed_positions
        movable = segment.is_added or bool(segment.removed)
        if groups and movable and _movable(groups[-1][-1]) and size + live <= limit:
            groups[-1].append(segment)
            size += live
        else:
            groups.append([segment])
            size = live
    return groups


def _movable(segment: SegmentRecord) -> bool:
    return segment.is_added or bool(segment.removed)


def _copy(
    snapshot: Snapshot, builder: SegmentBuilder, vocab_size: int, name: str, kept: Sequence[SurvivingDocuments]
) -> SegmentRecord:
    """Build a segment with some documents of others, and their tags."""
    text = TextWriter(vocab_size)
    spans, parts = [], []
    tags: dict[str, list[int]] = {}
    overlapping: list[int] = []
    unseen: list[int] = []
    count = 0
    for one in kept:
        stream = text_of(snapshot, one.segment)
        parts.append({kind: snapshot.part(one.segment, kind) for kind in one.segment.parts})
        spans.append([(int(stream.starts[each]), int(stream.starts[each + 1])) for each in one.documents])
        where = {old: count + new for new, old in enumerate(one.documents)}
        for old in one.documents:
            text.add(stream.tokenized(old))
        for tag, numbers in one.segment.tags.items():
            tags.setdefault(tag, []).extend(where[old] for old in numbers if old in where)
        overlapping += [where[old] for old in one.segment.overlapping if old in where]
        unseen += [where[old] for old in one.segment.unseen if old in where]
        count += len(one.documents)
    made = builder.build(name, text, CopiedRows(parts, spans))
    tagged = {tag: tuple(sorted(numbers)) for tag, numbers in tags.items() if numbers}
    return replace(made, tags=tagged, overlapping=tuple(sorted(overlapping)), unseen=tuple(sorted(unseen)))
