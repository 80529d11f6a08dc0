"""The way from text to a segment of a finished run, part by part, with what the run's stages have trained.

Each stage writes its own part (`Stage.write_part`). A segment of new text is encoded; a compacted one copies rows of
the segments that it replaces. Its index is filled anew in both cases, so that no trace of a removed row is left in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnlm.artifact import Artifact, ArtifactFiles, Draft, disk, make_part
from gnnlm.artifact.ownership import settle
from gnnlm.corpus.stream import TEXT, Stream
from gnnlm.corpus.text_writer import TextWriter
from gnnlm.generation import SegmentRecord
from gnnlm.run.snapshot import Snapshot
from gnnlm.stage import SegmentSource, Stage

COPIED_AT_ONCE = 65_536  # rows
Span = tuple[int, int]


@dataclass(frozen=True)
class CopiedRows:
    """Rows of other segments that a compacted one takes: parts by kind, and spans first..last-1 of positions."""

    parts: Sequence[Mapping[str, Artifact]]
    spans: Sequence[Sequence[Span]]

    def write(self, draft: Draft, kind: str) -> dict[str, Any]:
        """Write the rows of every array of a part."""
        sources = [part[kind] for part in self.parts]
        names = [name for name in sources[0].manifest.files if name.endswith(".npy")]
        rows = sum(last - first for spans in self.spans for first, last in spans)
        for name in names:
            arrays = [source.array(name) for source in sources]
            writer = draft.writer(name, (rows, *arrays[0].shape[1:]), arrays[0].dtype)
            for array, spans in zip(arrays, self.spans, strict=True):
                for first, last in spans:
                    for start in range(first, last, COPIED_AT_ONCE):
                        writer.append(array[start : min(start + COPIED_AT_ONCE, last)])
        return {"positions" if kind == "states" else "rows": rows}


class SegmentBuilder:
    """Builds segments with the trained artifacts of a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def build(self, name: str, text: TextWriter, copied: CopiedRows | None = None) -> SegmentRecord:
        """Build a segment in the run directory, unreferenced until a generation that names it is committed."""
        folder = self._snapshot.root / name
        made = self._build_part(folder / TEXT, text.inputs, text.write_part)
        stream, parts = Stream(made, "train", [ArtifactFiles(made)]), {TEXT: made}
        for stage in self._snapshot.stages.values():
            if not stage.part or stage.part == TEXT:
                continue
            source = SegmentSource(stream, parts)
            inputs = stage.part_inputs(self._snapshot, source)
            if inputs is not None:
                parts[stage.part] = self._stage_part(stage, folder / stage.part, inputs, source, copied)
        disk.sync_directory(folder.parent)  # the parts themselves are synced
        fingerprints = {kind: part.fingerprint for kind, part in parts.items()}
        return SegmentRecord(name, fingerprints, len(stream.starts) - 1, len(stream))

    def _stage_part(
        self, stage: Stage, path: Path, inputs: dict[str, Any], source: SegmentSource, copied: CopiedRows | None
    ) -> Artifact:
        if copied is None or not stage.part_is_copied:
            return self._build_part(path, inputs, lambda draft: stage.write_part(self._snapshot, source, draft))
        # recorded, because a copied row may differ in its last bit from one that is computed again
        copied_from = [part[stage.part].fingerprint for part in copied.parts]
        return self._build_part(
            path, {**inputs, "copied from": copied_from}, lambda draft: copied.write(draft, stage.part)
        )

    def _build_part(self, path: Path, inputs: Mapping[str, Any], write: Any) -> Artifact:
        make_part(path, inputs, write, {"threads": self._snapshot.run.engine.threads})
        settle(path)
        disk.sync_directory(path)  # no later command settles this part again
        return Artifact.open(path)
