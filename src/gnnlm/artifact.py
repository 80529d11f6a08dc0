"""Artifacts: directories that are whole or not there, know what they were made from, and resume.

An artifact is a directory with a `manifest.json`: format, stage, inputs (config values and the
fingerprints of parent artifacts), facts, and size and checksum of every file. It is built in a hidden
directory beside its place and renamed when whole. A build commits after each shard; after a crash it
goes on from the last commit, and ends in the same bytes as a build that was never interrupted.

Knows nothing of what the stages are.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from gnnlm.errors import ArtifactError

FORMAT = 1
MANIFEST = "manifest.json"
JOURNAL = "journal.json"
TRUST_ABOVE = 64 * 2**20  # files larger than this are hashed again only when their time has changed
Array = npt.NDArray[Any]
State = Literal["done", "stale", "half-done", "missing", "damaged"]


def fingerprint(value: object) -> str:
    """Sixteen hex digits that stand for a JSON value.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class Artifact:
    """A whole artifact, its files checked against the manifest."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Artifact:
        """Open and verify; a file that was cut, edited or lost is refused."""
        manifest = read_manifest(path)
        for name, entry in manifest["files"].items():
            file = path / name
            rebuild = f"rebuild it: gnnlm run {path.parent} --rebuild"
            if not file.is_file():
                raise ArtifactError(f"{file} is missing; {rebuild}")
            stat = file.stat()
            if stat.st_size != entry["bytes"]:
                raise ArtifactError(f"{file} has {stat.st_size} bytes, its manifest says {entry['bytes']}; {rebuild}")
            trusted = stat.st_size > TRUST_ABOVE and stat.st_mtime_ns == entry["mtime_ns"]
            if not trusted and sha256(file) != entry["sha256"]:
                raise ArtifactError(f"{file} was edited after it was made (its checksum differs); {rebuild}")
        return cls(path, manifest)

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.manifest["facts"]
        return facts

    @property
    def inputs(self) -> dict[str, Any]:
        inputs: dict[str, Any] = self.manifest["inputs"]
        return inputs

    @property
    def fingerprint(self) -> str:
        return manifest_fingerprint(self.manifest)

    def array(self, name: str) -> Array:
        """A memory-mapped array."""
        array: Array = np.load(self.path / name, mmap_mode="r", allow_pickle=False)
        return array


def read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found = manifest["format"]
        for key in ("stage", "inputs", "files", "facts"):
            manifest[key]
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist; run gnnlm run first") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{file} is damaged ({error}); delete {path} and run again") from error
    if found != FORMAT:
        raise ArtifactError(f"{path} has format {found}, this version reads {FORMAT}; delete it and run again")
    return manifest


def manifest_fingerprint(manifest: Mapping[str, Any]) -> str:
    """What an artifact is: its inputs and its bytes, not when it was made or how long that took."""
    files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return fingerprint([manifest["format"], manifest["stage"], manifest["inputs"], files])


def draft_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def state_of(path: Path, inputs: Mapping[str, Any]) -> State:
    """Whether the artifact at `path` is there, whole and made from `inputs` (files are measured, not hashed)."""
    if (path / MANIFEST).is_file():
        try:
            manifest = read_manifest(path)
            sizes = {name: (path / name).stat().st_size for name in manifest["files"]}
        except (ArtifactError, FileNotFoundError):
            return "damaged"
        if any(size != manifest["files"][name]["bytes"] for name, size in sizes.items()):
            return "damaged"
        return "done" if manifest["inputs"] == dict(inputs) else "stale"
    return "half-done" if draft_path(path).is_dir() else "missing"


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two sets of inputs, both sides named.

    >>> differences({"gnn.layers": 3, "seed": 0}, {"gnn.layers": 2, "seed": 0})
    'gnn.layers was 3, is now 2'
    """
    keys = [key for key in dict.fromkeys([*was, *now]) if was.get(key) != now.get(key)]
    return "; ".join(f"{key} was {_show(was.get(key))}, is now {_show(now.get(key))}" for key in keys)


def _show(value: object) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Draft:
    """An artifact being built. Use `with Draft(...) as draft`, append, commit, finish.

    Leaving the block without `finish` keeps what was committed, for the next try.
    """

    def __init__(self, path: Path, stage: str, inputs: Mapping[str, Any], *, rebuild: bool = False) -> None:
        self.path, self.stage, self.inputs = path, stage, dict(inputs)
        self.folder = draft_path(path)
        self._writers: dict[str, ArrayWriter] = {}
        journal = self._read_journal()
        if journal is not None and journal["inputs"] != self.inputs and not rebuild:
            raise ArtifactError(
                f"{self.folder} is half-built from other inputs ({differences(journal['inputs'], self.inputs)}); "
                "discard it with --rebuild, or choose another run directory (run: in the config)"
            )
        if journal is None or journal["inputs"] != self.inputs:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            journal = {"inputs": self.inputs, "step": 0, "bytes": {}, "notes": {}}
        self._journal = journal
        self.resumed = bool(journal["step"])

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()
        if self.step == 0:  # nothing to go on from
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def step(self) -> int:
        """How many commits have been made, over all tries."""
        return int(self._journal["step"])

    @property
    def notes(self) -> dict[str, Any]:
        """Small JSON values that survive a crash together with the arrays."""
        notes: dict[str, Any] = self._journal["notes"]
        return notes

    def writer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> ArrayWriter:
        """An array of known shape, appended to row by row; it goes on where the last commit left it."""
        writer = ArrayWriter(self.folder / name, shape, np.dtype(dtype), self._journal["bytes"].get(name))
        self._writers[name] = writer
        return writer

    def save(self, name: str, array: Array) -> None:
        with writing(self.folder / name):
            np.save(self.folder / name, array, allow_pickle=False)

    def write_text(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    @property
    def bytes_there(self) -> int:
        """What an earlier try has left on the disk."""
        return sum(f.stat().st_size for f in self.folder.iterdir() if f.is_file())

    def commit(self) -> None:
        """Everything appended so far survives a crash from here on."""
        for name, writer in self._writers.items():
            self._journal["bytes"][name] = writer.sync()
        self._journal["step"] += 1
        write_json(self.folder / JOURNAL, self._journal)

    def finish(self, facts: Mapping[str, Any], files: Sequence[str] | None = None) -> Artifact:
        """Check, sum up and put the artifact in its place. Files not in `files`, where given, are let go."""
        for writer in self._writers.values():
            writer.sync()
            writer.check_whole()
            writer.close()
        if files is None:
            ours = (JOURNAL, MANIFEST, f"{JOURNAL}.new", f"{MANIFEST}.new")
            files = [p.name for p in sorted(self.folder.iterdir()) if p.name not in ours]
        manifest = {
            "format": FORMAT,
            "stage": self.stage,
            "inputs": self.inputs,
            "facts": dict(facts),
            "files": {name: _entry(self.folder / name) for name in files},
        }
        write_json(self.folder / MANIFEST, manifest)
        replace_directory(self.folder, self.path)
        for path in self.path.iterdir():
            if path.name not in (*files, MANIFEST):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return Artifact(self.path, manifest)

    def _read_journal(self) -> dict[str, Any] | None:
        try:
            journal: dict[str, Any] = json.loads((self.folder / JOURNAL).read_text(encoding="utf-8"))
            whole = all((self.folder / name).stat().st_size >= size for name, size in journal["bytes"].items())
            return journal if whole and {"inputs", "step", "notes"} <= journal.keys() else None
        except (FileNotFoundError, ValueError, AttributeError, KeyError):
            return None


def _entry(file: Path) -> dict[str, Any]:
    stat = file.stat()
    return {"bytes": stat.st_size, "sha256": sha256(file), "mtime_ns": stat.st_mtime_ns}


class ArrayWriter:
    """Appends rows to an .npy file of known shape.

    Plain writes, not a memory map: a full disk is then an error that can be told, not a crash.
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


def write_json(path: Path, value: object) -> None:
    """Write JSON so that the file is the old one or the new one, never half of one."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def replace_directory(new: Path, place: Path) -> None:
    """Move a directory into place; what was there before goes only when the new one is there."""
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def link_directory(source: Path, place: Path) -> None:
    """The same files in another place: links where the file system can, else copies."""
    place.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, place / file.name)
        except OSError:
            with writing(place / file.name):
                shutil.copy2(file, place / file.name)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around libraries that write files: whatever they raise when the disk is full becomes one error of ours.

    safetensors, FAISS and numpy each report it in their own way, some without an errno.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        words = " ".join(str(error).split())
        room = shutil.disk_usage(path.parent).free
        raise ArtifactError(
            f"{path} could not be written ({words[:120]}; {human_bytes(room)} are free there); free some space and run "
            "the same command again: it goes on where it stopped"
        ) from error


def require_space(folder: Path, needed: int, what: str) -> None:
    """Refuse before starting when the disk cannot hold what will be written."""
    there = next(p for p in [folder, *folder.parents] if p.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ArtifactError(
            f"{what} needs {human_bytes(needed)} at {there}, {human_bytes(free)} are free; "
            "free some space, or choose another run directory (run: in the config)"
        )


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def human_bytes(count: float) -> str:
    """
    >>> human_bytes(1536)
    '1.5 KB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"
