"""Compaction: segments without the documents that were removed from them, and small segments as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnnlm.artifact import Artifact
from gnnlm.corpus.text_writer import TextWriter
from gnnlm.generation import Generation, Segment
from gnnlm.generation.current import generation_file
from gnnlm.layout import ADDED
from gnnlm.library.catalogue import text_of
from gnnlm.library.ingest import NewTexts
from gnnlm.library.segment_builder import Copied, SegmentMaker
from gnnlm.run import Run


@dataclass(frozen=True)
class Kept:
    """What a compacted segment takes over from another: some of its documents."""

    segment: Segment
    documents: tuple[int, ...]


def compacted(run: Run, now: Generation, maker: SegmentMaker, number: int) -> tuple[Segment, ...] | None:
    """The segments of the next generation, with what was removed left out; None if there is nothing to do.

    A segment that nothing was removed from is copied only where it joins others: added segments that lie beside each
    other, up to `store.segment_tokens` positions.
    """
    out: list[Segment] = []
    made = 0
    for group in _groups(now.segments, run.config.store.segment_tokens):
        if len(group) == 1 and not group[0].removed:
            out.append(group[0])
            continue
        kept = [Kept(one, tuple(n for n in range(one.documents) if n not in set(one.removed))) for one in group]
        kept = [one for one in kept if one.documents]
        if kept:
            out.append(_copy(run, now, maker, f"{ADDED}/{number:04d}.{made}", kept))
            made += 1
    return None if tuple(out) == now.segments else tuple(out)


def _groups(segments: Sequence[Segment], limit: int) -> list[list[Segment]]:
    """Segments that become one each: neighbours that are added or lose documents, as far as they fit."""
    groups: list[list[Segment]] = []
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


def _movable(segment: Segment) -> bool:
    return segment.is_added or bool(segment.removed)


def _copy(run: Run, now: Generation, maker: SegmentMaker, name: str, kept: Sequence[Kept]) -> Segment:
    """A new segment with some documents of others, and their tags."""
    text = TextWriter(NewTexts(run).vocab_size)
    spans, parts = [], []
    tags: dict[str, list[int]] = {}
    overlapping: list[int] = []
    unseen: list[int] = []
    count = 0
    for one in kept:
        stream = text_of(run, one.segment, now.number)
        record = generation_file(run.root, now.number)
        parts.append(
            {
                kind: Artifact.open_part(run.root / one.segment.path_of(kind), found, record)
                for kind, found in one.segment.parts.items()
            }
        )
        spans.append([(int(stream.starts[each]), int(stream.starts[each + 1])) for each in one.documents])
        where = {old: count + new for new, old in enumerate(one.documents)}
        for old in one.documents:
            text.add(stream.tokenized(old))
        for tag, numbers in one.segment.tags.items():
            tags.setdefault(tag, []).extend(where[old] for old in numbers if old in where)
        overlapping += [where[old] for old in one.segment.overlapping if old in where]
        unseen += [where[old] for old in one.segment.unseen if old in where]
        count += len(one.documents)
    made = maker.make(name, text, Copied(parts, spans))
    tagged = {tag: tuple(sorted(numbers)) for tag, numbers in tags.items() if numbers}
    return replace(made, tags=tagged, overlapping=tuple(sorted(overlapping)), unseen=tuple(sorted(unseen)))
