"""An artifact being built: arrays that grow shard by shard, and a journal of what has been committed."""

from __future__ import annotations

import io
import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.artifact import disk
from gnnlm.artifact.blocks import Array, crc32_of, file_entry
from gnnlm.artifact.file_io import require_space, telling, write_json
from gnnlm.artifact.manifest import (
    MANIFEST,
    differences,
    draft_path,
    erased_files,
    fingerprint,
    make_manifest,
    plain,
    read_manifest,
    sealed,
)
from gnnlm.artifact.ownership import (
    JOURNAL,
    NAMES,
    bytes_of,
    check_place,
    draft_names,
    is_finished,
    is_scratch,
    named,
    remove_ours,
    settle,
    state_of,
)
from gnnlm.artifact.reader import Artifact
from gnnlm.errors import ArtifactError
from gnnlm.progress import warn

SHARDS = "shards"  # the folder of a draft with finished shards that are not yet in its files


class Draft:
    """An artifact being built. Use `with Draft(...) as draft`, append, commit, finish.

    Leaving the block without `finish` keeps what was committed, for the next attempt.
    """

    def __init__(
        self,
        path: Path,
        stage: str,
        inputs: Mapping[str, Any],
        *,
        rebuild: bool = False,
        waits: bool = False,
        made_with: Mapping[str, Any] | None = None,
    ) -> None:
        """`waits`: the artifact is a part, which is moved into place together with the artifact that it belongs to.

        `made_with` is recorded: what is no input, but may show in the last bit of a number.
        """
        self.path, self.stage, self.inputs = path, stage, plain(dict(inputs))
        self.folder, self._waits, self._made_with = draft_path(path), waits, dict(made_with or {})
        self._writers: dict[str, ArrayWriter] = {}
        self._parts: dict[str, str] = {}
        self._finished = False
        check_place(path)  # refuse before the long work, not after it
        journal = self._read_journal()
        if journal is not None and journal["inputs"] != self.inputs and not rebuild:
            raise ArtifactError(
                f"{self.folder} is half-built from other inputs ({differences(journal['inputs'], self.inputs)})",
                path,
                "other inputs",
            )
        self._names = draft_names(self.folder)
        if journal is None or journal["inputs"] != self.inputs:
            remove_ours(self.folder)
            disk.make_directory(self.folder)
            journal = {"inputs": self.inputs, "step": 0, "bytes": {}, "digests": {}, "files": {}, "notes": {}}
            self._names = set()
            self._claim(JOURNAL, MANIFEST)
        self._journal = journal
        self.resumed = bool(journal["step"])

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()
        if self._finished:
            return
        with suppress(OSError, ArtifactError):  # the exception being raised says more
            self._claim_all()
            if self.step == 0:  # nothing to resume from
                remove_ours(self.folder)

    @property
    def step(self) -> int:
        """How many commits have been made, over all attempts."""
        return int(self._journal["step"])

    @property
    def notes(self) -> dict[str, Any]:
        """Small JSON values that survive a crash together with the arrays."""
        notes: dict[str, Any] = self._journal["notes"]
        return notes

    def file(self, name: str) -> Path:
        """The path of a file or folder that is about to be written.

        The draft records the name before the file exists: after a kill it can tell its own files from others, and
        refuses to remove others.
        """
        self._claim(name)
        return self.folder / name

    @property
    def shards(self) -> Path:
        """The folder for the files of shards; a build that is resumed finds those that were finished."""
        return self.file(SHARDS)

    def _claim(self, *names: str) -> None:
        if not self._names.issuperset(names):
            self._names.update(names)
            write_json(self.folder / NAMES, named(sorted(self._names)))

    def _claim_all(self) -> None:
        """Record every file in the folder as this build's own: the folder was empty when the build began."""
        self._claim(*(path.name for path in self.folder.iterdir() if not path.name.endswith(".new")))

    def writer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> ArrayWriter:
        """An array of known shape, appended to row by row; it resumes where the last commit left it."""
        known = (self._journal["bytes"][name], self._journal["digests"][name]) if self._has_rows(name) else None
        writer = ArrayWriter(self.file(name), shape, np.dtype(dtype), known)
        self._writers[name] = writer
        return writer

    def _has_rows(self, name: str) -> bool:
        return name in self._journal["bytes"]

    def save(self, name: str, array: Array) -> None:
        """An array, whole. Plain writes: numpy's own do not notice a disk that is full at their last buffer."""
        array = np.ascontiguousarray(array)
        assert not array.dtype.hasobject
        with telling(self.file(name)), disk.create(self.folder / name) as file:
            disk.write(file, npy_header(array.shape, array.dtype))
            disk.write(file, array.data)
            disk.sync(file)

    def write_bytes(self, name: str, data: bytes | bytearray) -> None:
        with telling(self.file(name)):
            disk.write_file(self.folder / name, data)

    def part(self, name: str, inputs: Mapping[str, Any], build: Callable[[Draft], Mapping[str, Any]]) -> None:
        """Make a part, or find it finished; `name` is its path in the run directory."""
        if not self.step:
            self.commit()  # there is something to resume from now
        self.add_part(name, make_part(self.path.parent / name, inputs, build, self._made_with))

    def require_space(self, parts: Mapping[str, tuple[Mapping[str, Any], int]], own: int, what: str) -> None:
        """Refuse when the disk cannot hold the artifact: its own bytes, and the bytes of parts with these inputs.

        Parts that are in place and made from these inputs take no more space, nor does what an earlier attempt has
        left.
        """
        needed = own - self.bytes_there
        for name, (inputs, size) in parts.items():
            place = self.path.parent / name
            if state_of(place, inputs) != "done":
                needed += size - bytes_of(draft_path(place))
        require_space(self.folder, needed, what)

    def add_part(self, name: str, fingerprint: str) -> None:
        """Name a part that was made with `make_part`, here or elsewhere; parts keep this order."""
        self._parts[name] = fingerprint

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode())

    @property
    def bytes_there(self) -> int:
        """Bytes that an earlier attempt has left on the disk."""
        return sum(f.stat().st_size for f in self.folder.iterdir() if f.is_file())

    def commit(self, *names: str, without: Sequence[str] = ()) -> None:
        """Make everything appended so far survive a crash, and these files, or the files in these folders.

        The next attempt relies on them and on those of earlier commits, `without` some: it starts over if they are not
        what they are now.
        """
        self._claim_all()
        for name, writer in self._writers.items():
            self._journal["bytes"][name], self._journal["digests"][name] = writer.sync()
        files: dict[str, list[int]] = self._journal["files"]
        for name in [name for name in files if Path(name).parts[0] in without]:
            del files[name]
        for name in names:
            disk.sync_tree(self.folder / name)
            for file in _files_below(self.folder / name):
                files[str(file.relative_to(self.folder))] = [file.stat().st_size, crc32_of(file)]
        disk.sync_directory(self.folder)
        self._journal["step"] += 1
        write_json(self.folder / JOURNAL, sealed(self._journal))

    def finish(self, facts: Mapping[str, Any], files: Sequence[str] | None = None) -> Artifact:
        """Check the artifact, write its manifest and move it into place; with `files`, all other files are removed."""
        for writer in self._writers.values():
            writer.sync()
            writer.check_whole()
            writer.close()
        self._claim_all()
        disk.remove_tree(self.folder / SHARDS)
        if files is None:
            ours = (NAMES, JOURNAL, MANIFEST)
            names = (p.name for p in self.folder.iterdir() if p.suffix != ".new" and not is_scratch(p.name))
            files = sorted(name for name in names if name not in ours)
        mode = stat.S_IMODE((self.folder / NAMES).stat().st_mode)
        for name in files:  # safetensors creates files that only their owner may read
            if stat.S_IMODE((self.folder / name).stat().st_mode) != mode:
                disk.set_mode(self.folder / name, mode)
            disk.sync_file(self.folder / name)
        disk.sync_directory(self.folder)
        entries = {name: file_entry(self.folder / name) for name in files}
        manifest = make_manifest(self.stage, self.inputs, dict(facts), entries, self._parts, self._made_with)
        write_json(self.folder / MANIFEST, sealed(manifest))
        self._finished = True  # from here on the artifact is complete, wherever it is
        if self._waits:
            return Artifact.open(self.folder, verify=False)
        settle(self.path)
        return Artifact.open(self.path, verify=False)

    def _read_journal(self) -> dict[str, Any] | None:
        """The journal of an earlier attempt; None where there is none, or where it cannot be resumed."""
        if not (self.folder / JOURNAL).is_file():
            return None
        try:
            journal: dict[str, Any] = json.loads((self.folder / JOURNAL).read_bytes())
            if journal.pop("checksum", None) != (fingerprint(journal) if "files" in journal else None):
                raise ValueError("it was changed after it was written")
            kinds = {"inputs": dict, "step": int, "bytes": dict, "notes": dict}
            if any(not isinstance(journal[key], kind) for key, kind in kinds.items()):
                raise TypeError("it is not a journal")
            self._check_committed(journal)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            warn(f"{self.folder} has lost or damaged data, so this stage starts over ({error})")
            return None
        return journal

    def _check_committed(self, journal: dict[str, Any]) -> None:
        """Raise if what a journal relies on is not there as it was; a journal of an older version has no digests."""
        known = journal.setdefault("digests", {})
        for name, size in journal["bytes"].items():
            if (self.folder / name).stat().st_size < size:
                raise ValueError(f"{name} is cut short")
            if known.setdefault(name, found := crc32_of(self.folder / name, size)) != found:
                raise ValueError(f"{name} is damaged")
        for name, entry in journal.setdefault("files", {}).items():
            if [(self.folder / name).stat().st_size, crc32_of(self.folder / name)] != entry:
                raise ValueError(f"{name} is damaged")


def make_part(
    path: Path,
    inputs: Mapping[str, Any],
    build: Callable[[Draft], Mapping[str, Any]],
    made_with: Mapping[str, Any] | None = None,
) -> str:
    """Make an artifact that is part of another, and return its fingerprint; `build` fills a draft and returns facts.

    A part that was made from the same inputs is found, not made again, whether it is in place or waits for the
    artifact that it belongs to. One in place is hashed to the last byte first: a rebuild must not keep damage.
    """
    if found := found_part(path, inputs):
        return found
    with Draft(path, path.name, inputs, rebuild=True, waits=True, made_with=made_with) as draft:
        return draft.finish(build(draft)).fingerprint


def found_part(path: Path, inputs: Mapping[str, Any]) -> str | None:
    """The fingerprint of a whole part that was made from these inputs; None if there is none, or if it was erased."""
    places = [(path, False)]
    if is_finished(path):
        places.insert(0, (draft_path(path), True))
    for folder, trust in places:
        with suppress(ArtifactError):  # not there, or damaged
            if read_manifest(folder)["inputs"] == plain(dict(inputs)) and not erased_files(folder):
                return Artifact.open(folder, trust=trust).fingerprint
    return None


def _files_below(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """What an .npy file of a C-ordered array begins with."""
    header = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


class ArrayWriter:
    """Appends rows to an .npy file of known shape.

    Plain writes, not a memory map: a full disk is then an error that can be reported, not a crash.
    """

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], committed: tuple[int, int] | None
    ) -> None:
        """`committed`: the bytes to go on from, and their digest."""
        self.path, self.shape, self.dtype = path, shape, dtype
        self._row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self._file, self._digest = disk.create(path) if committed is None else path.open("r+b"), 0
        if committed is not None:
            size, self._digest = committed
            disk.truncate(self._file, size)
            np.lib.format.read_magic(self._file)
            np.lib.format.read_array_header_1_0(self._file)
            self._start = self._file.tell()
            self._file.seek(0, os.SEEK_END)
        else:
            self._write(npy_header(shape, dtype))
            self._start = self._file.tell()

    @property
    def rows(self) -> int:
        return (self._file.tell() - self._start) // self._row_bytes

    def append(self, rows: Array) -> None:
        assert rows.shape[1:] == self.shape[1:], (rows.shape, self.shape)
        self._write(np.ascontiguousarray(rows, dtype=self.dtype).data)

    def _write(self, data: bytes | memoryview) -> None:
        disk.write(self._file, data)
        self._digest = zlib.crc32(data, self._digest)

    def sync(self) -> tuple[int, int]:
        """Make what was appended last; its size in bytes, and its digest."""
        if not self._file.closed:
            disk.sync(self._file)
        return self.path.stat().st_size, self._digest

    def check_whole(self) -> None:
        assert self.rows == self.shape[0], f"{self.path}: {self.rows} rows written, {self.shape[0]} promised"

    def close(self) -> None:
        self._file.close()
