"""An artifact being built: arrays that grow shard by shard, and a journal of what has been committed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.artifact.files import require_space, sha256, sync_directory, write_json, writing
from gnnlm.artifact.manifest import MANIFEST, differences, erased_files, make_manifest, plain, read_manifest, sealed
from gnnlm.artifact.place import (
    JOURNAL,
    NAMES,
    bytes_of,
    check_place,
    draft_names,
    draft_path,
    remove,
    remove_ours,
    settle,
    state_of,
)
from gnnlm.artifact.reading import Array, Artifact
from gnnlm.errors import ArtifactError

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
                f"{self.folder} is half-built from other inputs ({differences(journal['inputs'], self.inputs)}); "
                "discard it with --rebuild, or choose another run directory (run: in the config)"
            )
        self._names = draft_names(self.folder)
        if journal is None or journal["inputs"] != self.inputs:
            remove_ours(self.folder)
            self.folder.mkdir(parents=True)
            journal = {"inputs": self.inputs, "step": 0, "bytes": {}, "notes": {}}
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
            write_json(self.folder / NAMES, sorted(self._names))

    def _claim_all(self) -> None:
        """Record every file in the folder as this build's own: the folder was empty when the build began."""
        self._claim(*(path.name for path in self.folder.iterdir() if not path.name.endswith(".new")))

    def writer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> ArrayWriter:
        """An array of known shape, appended to row by row; it resumes where the last commit left it."""
        writer = ArrayWriter(self.file(name), shape, np.dtype(dtype), self._journal["bytes"].get(name))
        self._writers[name] = writer
        return writer

    def save(self, name: str, array: Array) -> None:
        """An array, whole. Plain writes: numpy's own do not notice a disk that is full at their last buffer."""
        array = np.ascontiguousarray(array)
        assert not array.dtype.hasobject
        header = {"shape": array.shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(array.dtype)}
        with writing(self.file(name)), (self.folder / name).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.write(array.data)

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
        self.file(name).write_text(text, encoding="utf-8")

    @property
    def bytes_there(self) -> int:
        """Bytes that an earlier attempt has left on the disk."""
        return sum(f.stat().st_size for f in self.folder.iterdir() if f.is_file())

    def commit(self) -> None:
        """Make everything appended so far survive a crash."""
        self._claim_all()
        for name, writer in self._writers.items():
            self._journal["bytes"][name] = writer.sync()
        self._journal["step"] += 1
        write_json(self.folder / JOURNAL, self._journal)

    def finish(self, facts: Mapping[str, Any], files: Sequence[str] | None = None) -> Artifact:
        """Check the artifact, write its manifest and move it into place; with `files`, all other files are removed."""
        for writer in self._writers.values():
            writer.sync()
            writer.check_whole()
            writer.close()
        self._claim_all()
        remove(self.folder / SHARDS)
        if files is None:
            ours = (NAMES, JOURNAL, MANIFEST)
            names = (path.name for path in self.folder.iterdir() if path.suffix != ".new")
            files = sorted(name for name in names if name not in ours)
        mode = stat.S_IMODE((self.folder / NAMES).stat().st_mode)
        for name in files:  # safetensors creates files that only their owner may read
            (self.folder / name).chmod(mode)
        entries = {name: _entry(self.folder / name) for name in files}
        manifest = make_manifest(self.stage, self.inputs, dict(facts), entries, self._parts, self._made_with)
        write_json(self.folder / MANIFEST, sealed(manifest))
        sync_directory(self.folder)
        self._finished = True  # from here on the artifact is complete, wherever it is
        if self._waits:
            return Artifact.open(self.folder, verify=False)
        settle(self.path)
        return Artifact.open(self.path, verify=False)

    def _read_journal(self) -> dict[str, Any] | None:
        """The journal of an earlier attempt; None where there is none, or where it cannot be resumed."""
        try:
            journal = json.loads((self.folder / JOURNAL).read_bytes())
            kinds = {"inputs": dict, "step": int, "bytes": dict, "notes": dict}
            if any(not isinstance(journal[key], kind) for key, kind in kinds.items()):
                return None
            whole = all((self.folder / name).stat().st_size >= size for name, size in journal["bytes"].items())
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return journal if whole else None


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
    for folder, trust in ((draft_path(path), True), (path, False)):
        with suppress(ArtifactError):  # not there, or damaged
            if read_manifest(folder)["inputs"] == plain(dict(inputs)) and not erased_files(folder):
                return Artifact.open(folder, trust=trust).fingerprint
    return None


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        status = os.fstat(file.fileno())
        return {"bytes": status.st_size, "sha256": sha256(file), "mtime_ns": status.st_mtime_ns}


class ArrayWriter:
    """Appends rows to an .npy file of known shape.

    Plain writes, not a memory map: a full disk is then an error that can be reported, not a crash.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], committed: int | None) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype
        self._row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self._file = path.open("w+b" if committed is None else "r+b")
        if committed is not None:
            self._file.truncate(committed)
            self._file.seek(0)
            np.lib.format.read_magic(self._file)
            np.lib.format.read_array_header_1_0(self._file)
            self._start = self._file.tell()
            self._file.seek(0, os.SEEK_END)
        else:
            header = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
            np.lib.format.write_array_header_1_0(self._file, header)
            self._start = self._file.tell()

    @property
    def rows(self) -> int:
        return (self._file.tell() - self._start) // self._row_bytes

    def append(self, rows: Array) -> None:
        assert rows.shape[1:] == self.shape[1:], (rows.shape, self.shape)
        self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)

    def sync(self) -> int:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def check_whole(self) -> None:
        assert self.rows == self.shape[0], f"{self.path}: {self.rows} rows written, {self.shape[0]} promised"

    def close(self) -> None:
        self._file.close()
