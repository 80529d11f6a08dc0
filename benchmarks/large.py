"""A run directory that opens like one of millions of rows, and takes next to no disk.

What opening reads is real: manifests with the digests of all blocks, tokens, where documents begin. What it must not
read is a hole in a file of the right size: texts, states, the index, the tables of the cache.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path

import numpy as np
from common import peak_bytes

from gnnlm.artifact import blocks, read_manifest
from gnnlm.artifact.draft import npy_header
from gnnlm.artifact.manifest import FORMAT, MANIFEST, BlockDigests, FileEntry, Manifest
from gnnlm.config import load_config
from gnnlm.retrieval.auto_index import choose_index
from gnnlm.run import Run

LENGTH = 1000  # positions of a document
CHARACTERS = 5  # bytes of text for each position


def grow(run: Run, root: Path, rows: int) -> None:
    """Copy a finished run to `root`, with so many positions in the place of its store's."""
    run.copy(root)
    size = run.config.store.segment_tokens // LENGTH * LENGTH or LENGTH
    sizes = [min(size, rows - start) for start in range(0, rows, size)]
    new = Run(load_config(root), reading=True)
    documents = sum(-(-count // LENGTH) for count in sizes)
    for name, stage in new.stages.items():
        manifest = read_manifest(new.path(name))
        if name == "corpus":
            manifest.facts["train"] |= {"documents": documents, "tokens": rows - documents}
            manifest.inputs["store.segment_tokens"] = run.config.store.segment_tokens
        if name == "index":
            manifest.facts.update(rows=rows - documents, kind=_index_kind(run, rows - documents))
        kind = new.stages[name].part
        if kind and (kind != "index" or manifest.facts["kind"] != "exact"):
            like = root / "segments" / "0000" / kind
            parts = {
                f"segments/{number:04d}/{kind}": _part(root / f"segments/{number:04d}/{kind}", like, count)
                for number, count in reversed([*enumerate(sizes)])  # the first, which the others are like, comes last
            }
            manifest = manifest.model_copy(update={"parts": dict(sorted(parts.items()))})
        if name != "corpus":
            manifest = manifest.model_copy(update={"inputs": new.inputs(stage)})
        _write(new.path(name), manifest)


def _index_kind(run: Run, rows: int) -> str:
    return choose_index(run.config.index, rows, run.artifact("encode").facts["width"]).kind


def _part(folder: Path, like: Path, rows: int) -> str:
    """A part of so many positions with the files that another has; returns its fingerprint."""
    known = read_manifest(like) if like.is_dir() else None
    files = ["index.faiss"] if known is None else list(known.files)
    shapes = {name: np.load(like / name, mmap_mode="r") for name in files if name.endswith(".npy")}
    if not folder.is_dir():
        os.makedirs(folder)
    starts = np.array([*range(0, rows, LENGTH), rows])
    entries = {}
    for name in files:
        (folder / name).unlink(missing_ok=True)  # it may be a link to the file of the run that was copied
        with (folder / name).open("wb") as file:
            if name in ("starts.npy", "lines.npy"):
                np.save(file, starts * (CHARACTERS if name == "lines.npy" else 1))
            elif name == "names.json":
                file.write(json.dumps([f"{folder.parent.name}/{number}" for number in range(len(starts) - 1)]).encode())
            elif name == "documents.jsonl":
                file.truncate(CHARACTERS * rows)
            elif name == "index.faiss":
                file.truncate(128 * rows)
            else:
                shape, dtype = (rows, *shapes[name].shape[1:]), shapes[name].dtype
                header = npy_header(shape, dtype)
                file.write(header)
                file.truncate(len(header) + int(np.prod(shape)) * dtype.itemsize)
        entries[name] = _entry(folder / name)
    facts = {} if known is None else known.facts
    facts = {**facts, "positions": rows, "documents": len(starts) - 1}
    manifest = Manifest(format=FORMAT, stage=folder.name, inputs={"grown": rows}, facts=facts, files=entries)
    _write(folder, manifest)
    return manifest.fingerprint


def _entry(path: Path) -> FileEntry:
    """What a manifest says of a file; one that is too large to be read for this is a hole but for its first block."""
    size = path.stat().st_size
    if size <= blocks.LARGE:
        return blocks.file_entry(path)
    count, last = -(-size // blocks.BLOCK), (size - 1) % blocks.BLOCK + 1
    with path.open("rb") as file:
        crcs = [zlib.crc32(file.read(blocks.BLOCK))]
    crcs += [zlib.crc32(bytes(blocks.BLOCK))] * (count - 2) + [zlib.crc32(bytes(last))]
    digests = BlockDigests(bytes=blocks.BLOCK, crc32=np.array(crcs, ">u4").tobytes().hex())
    return FileEntry(bytes=size, sha256=f"{size:064x}", mtime_ns=path.stat().st_mtime_ns, blocks=digests)


def _write(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / MANIFEST).write_text(json.dumps(manifest.as_json()), encoding="utf-8")


def opening(root: Path) -> dict[str, float]:
    """Seconds and bytes of memory of opening a run: store and index; then network, cache and softmax as well."""
    before, began, worked = peak_bytes(), time.perf_counter(), time.process_time()

    def so_far(name: str) -> dict[str, float]:
        passed, work = time.perf_counter() - began, time.process_time() - worked
        return {f"{name}seconds": passed, f"{name}cpu_seconds": work, f"{name}bytes": peak_bytes() - before}

    parts = Run(load_config(root), reading=True).open_current()
    found = {"rows": len(parts.store), "found": len(parts.index), **so_far("")}
    assert parts.predictor.names
    return {**found, **so_far("ready_")}
