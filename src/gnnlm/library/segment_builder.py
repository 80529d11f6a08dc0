"""Making a segment: all its parts, with what the run has trained, by the same functions that its stages use.

The states of a new segment are encoded. Those of a compacted one are copied from the segments that it replaces, with
the codes and the tables of the cache; its index is filled anew, so that nothing of a removed row is left in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gnnlm.artifact import Artifact, Draft, Files, disk, make_part
from gnnlm.artifact.ownership import settle
from gnnlm.corpus.stream import TEXT, Stream
from gnnlm.corpus.text_writer import TextWriter
from gnnlm.datastore.codec import CODES, QUANTIZER, SegmentCodes, codes_inputs
from gnnlm.datastore.encode import STATES, Encoder, SegmentStates, states_inputs
from gnnlm.datastore.quantize import Quantizer
from gnnlm.datastore.store import Segment as Stored
from gnnlm.datastore.store import Store
from gnnlm.generation import Segment
from gnnlm.predict.cache_stage import PART as CACHE
from gnnlm.predict.cache_stage import tables_inputs
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.window_cache import QUANTIZERS, SegmentTables, TableMaker, quantizers_in
from gnnlm.retrieval.index import Rows, key_file
from gnnlm.run import Run
from gnnlm.run.segment import cached_from, encoded_from

INDEX = "index"
COPY_ROWS = 65_536  # rows that are copied at once
Span = tuple[int, int]


@dataclass(frozen=True)
class Copied:
    """The rows that a compacted segment takes over: of some parts by kind, the positions first..last-1 of each span."""

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
                    for start in range(first, last, COPY_ROWS):
                        writer.append(array[start : min(start + COPY_ROWS, last)])
        return {"positions" if kind == STATES else "rows": rows}


class SegmentMaker:
    """Makes segments for a run, all with the same trained parts."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def make(self, name: str, text: TextWriter, copied: Copied | None = None) -> Segment:
        """A segment in the run directory, all parts in place; it is no one's until a generation names it."""
        folder = self._run.root / name
        made = self._part(folder / TEXT, text.inputs, text.write_part)
        parts = self._parts(folder, made, copied)
        disk.sync_directory(folder.parent)  # the parts themselves are on the disk
        stream = Stream(made, "train", [Files(made)])
        return Segment(name, parts, len(stream.starts) - 1, len(stream))

    def _parts(self, folder: Path, text: Artifact, copied: Copied | None) -> dict[str, str]:
        """All parts of a segment whose text is there, by kind."""
        run = self._run
        stream = Stream(text, "train", [Files(text)])
        found = {TEXT: text.fingerprint}
        before = [text.fingerprint] if run.config.lm.continuous else None
        made_from = encoded_from(run, run.artifact("encode").inputs)
        states = self._made(
            folder / STATES, states_inputs(made_from, stream, before), copied, partial(self._encode, stream=stream)
        )
        found[STATES] = states.fingerprint
        codes = self._codes(folder / CODES, states, copied)
        if codes is not None:
            found[CODES] = codes.fingerprint
        if run.artifact("index").facts["kind"] != "exact":
            found[INDEX] = self._index(folder / INDEX, stream, states).fingerprint
        if "cache" in run.stages and run.artifact("cache").facts["form"] != "none":
            found[CACHE] = self._tables(folder / CACHE, stream, states, codes, copied).fingerprint
        return found

    def _encode(self, draft: Draft, stream: Stream) -> dict[str, Any]:
        run = self._run
        states = SegmentStates(Encoder(run.parts.lm, run.config.lm, run.config.store), stream)
        seconds = states.write(draft, "encode train", "tokens")
        return {"positions": states.rows, "seconds": seconds}

    def _codes(self, path: Path, states: Artifact, copied: Copied | None) -> Artifact | None:
        codec = self._run.artifact("codec")
        if codec.facts["kind"] == "fp16":
            return None
        quantizer = Quantizer.from_tensors(codec.tensors(QUANTIZER))
        inputs = codes_inputs(states.fingerprint, codec.manifest.files[QUANTIZER].sha256)

        def write(draft: Draft) -> dict[str, Any]:
            codes = SegmentCodes(quantizer, states.array("states.npy"))
            codes.write(draft, "codec", "states")
            return {"positions": codes.rows}

        return self._made(path, inputs, copied, write)

    def _index(self, path: Path, stream: Stream, states: Artifact) -> Artifact:
        from gnnlm.retrieval.faiss_build import TRAINED, fill_index, index_inputs

        index, rows = self._run.artifact("index"), Rows.of(stream)
        metric, learned = index.facts["metric"], index.manifest.files[TRAINED].sha256

        def write(draft: Draft) -> dict[str, Any]:
            keys = states.array(key_file(self._run.artifact("encode")))
            fill_index(index.file(TRAINED), keys, rows, metric, draft.file("index.faiss"))
            return {"rows": len(rows)}

        return self._part(path, index_inputs(states.fingerprint, stream, learned, metric), write)

    def _tables(
        self, path: Path, stream: Stream, states: Artifact, codes: Artifact | None, copied: Copied | None
    ) -> Artifact:
        run, cache, parts = self._run, self._run.artifact("cache"), self._run.parts
        learned = cache.manifest.files[QUANTIZERS].sha256 if QUANTIZERS in cache else None
        made_from = cached_from(run, states.fingerprint, None if codes is None else codes.fingerprint)
        form = cache.facts["form"]

        def write(draft: Draft) -> dict[str, Any]:
            assert parts.gnn is not None
            quantizers = [] if learned is None else quantizers_in(cache.tensors(QUANTIZERS))
            config = run.config
            store = Store([_stored(run, stream, states, codes)])
            graphs = GraphBuilder(store, config.gnn.left, config.gnn.right)
            maker = TableMaker(parts.gnn, config.cache.dtype, quantizers, parts.device)
            tables = SegmentTables(maker, graphs, range(len(stream)), form == "projected")
            tables.write(draft, "cache", "rows")
            return {"rows": tables.rows}

        return self._made(path, tables_inputs(made_from, form, cache.facts["dtype"], learned), copied, write)

    def _made(
        self,
        path: Path,
        inputs: Mapping[str, Any],
        copied: Copied | None,
        write: Callable[[Draft], Mapping[str, Any]],
    ) -> Artifact:
        """A part whose rows can be copied; a copy says so, for it may differ in the last bit from what it would be."""
        if copied is None:
            return self._part(path, inputs, write)
        came_from = [part[path.name].fingerprint for part in copied.parts]
        return self._part(path, {**inputs, "copied from": came_from}, lambda draft: copied.write(draft, path.name))

    def _part(self, path: Path, inputs: Mapping[str, Any], write: Callable[[Draft], Mapping[str, Any]]) -> Artifact:
        make_part(path, inputs, write, {"threads": self._run.engine.threads})
        settle(path)
        disk.sync_directory(path)  # nobody settles it again: what the draft needed for itself is gone for good
        return Artifact.open(path)


def _stored(run: Run, stream: Stream, states: Artifact, codes: Artifact | None) -> Stored:
    """A segment as the graph network reads it."""
    from gnnlm.datastore.quantize import CodedTable
    from gnnlm.datastore.store import mapped

    segment = Stored.over(stream, states.array("states.npy"))
    if codes is None:
        return segment
    quantizer = Quantizer.from_tensors(run.artifact("codec").tensors(QUANTIZER)).to(run.parts.device)
    return segment.coded(CodedTable(mapped(codes.array("codes.npy")), quantizer))
