"""Reading an artifact: all its files are opened and verified at once, so that they belong together."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from gnnlm.artifact import blocks
from gnnlm.artifact.blocks import Array, Blocks, CheckedArray
from gnnlm.artifact.manifest import (
    MANIFEST,
    erased_files,
    manifest_fingerprint,
    named_parts,
    old_path,
    other_part,
    parse_manifest,
    places,
    read_manifest,
)
from gnnlm.errors import ArtifactError, Fault, LimitError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Artifact:
    """A complete artifact, its files checked against the manifest.

    All files are held open: a build that replaces the directory later does not change what is read here. `path` is
    for messages, and for files that must be read by path; `check_in_place` then checks that they were still these.
    The files of its parts are verified when each is first read, and large files block by block, so that opening a large
    run reads little. (Large files of a run made before there were blocks are trusted while their time is the same.)
    """

    path: Path
    manifest: dict[str, Any]
    _files: dict[str, BinaryIO]
    parts: tuple[Artifact, ...] = ()
    _unverified: set[str] = field(default_factory=set)
    _arrays: dict[str, Array] = field(default_factory=dict)
    _blocks: dict[str, Blocks] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, verify: bool = True, trust: bool = True) -> Artifact:
        """Open and verify; refuse an artifact with a truncated, edited or missing file, or with another's part.

        Without `trust`, large files are hashed too.
        """
        while True:
            there = _identity(path)
            try:
                artifact = cls._opened(path)
                named = named_parts(artifact.manifest).items()
                parts = [cls.open_part(path.parent / name, found, path) for name, found in named]
                break
            except ArtifactError:
                if _identity(path) == there:
                    raise  # and not because a build has replaced it in the meantime
        if verify:
            artifact.verify(trust)
        artifact._unverified.clear()
        return replace(artifact, parts=tuple(parts))

    @classmethod
    def open_part(cls, place: Path, fingerprint: str, whole: Path) -> Artifact:
        """Open a part of what is at `whole`; its files are verified when each is first read.

        It is beside its place while a build replaces the artifact that it belongs to.
        """
        failed: list[ArtifactError] = []
        for folder in (*places(place), place):
            try:
                part = cls._opened(place, folder)
                if part.fingerprint == fingerprint:
                    return part
                failed.append(other_part(place, whole))
            except ArtifactError as error:
                failed.append(error)
        raise failed[-1]

    @classmethod
    def _opened(cls, path: Path, place: Path | None = None) -> Artifact:
        """Open and measure all files; they are verified later. `place`: where they are, if not at `path`."""
        folder = _folder(*([path, old_path(path), path] if place is None else [place]))
        if folder is None:
            raise ArtifactError(f"{path} does not exist yet", path, "missing")
        try:
            with _opened(folder, path, MANIFEST) as file:
                manifest = parse_manifest(file.read(), path)
            gone = erased_files(path)
            files = {name: _opened(folder, path, name) for name in manifest["files"] if name not in gone}
        finally:
            os.close(folder)
        for name, file in files.items():
            _measure(path / name, file, manifest["files"][name])
        return cls(path, manifest, files, _unverified=set(files))

    def verify(self, trust: bool = True) -> None:
        """Verify now what would be verified at its first use, in the parts too; without `trust`, every byte of all."""
        for name in sorted(self._unverified if trust else self._files):
            if not self._files[name].closed:  # else it was hashed when it was mapped
                self._verify(name, trust)
        for part in self.parts:
            part.verify(trust)

    def _verify(self, name: str, trust: bool = True) -> None:
        entry, file = self.manifest["files"][name], self._files[name]
        if not trust or not self._is_large(name):
            if _sha256(file) != entry["sha256"]:
                raise self._damaged(name)("its checksum differs")
        elif "blocks" not in entry and os.fstat(file.fileno()).st_mtime_ns != entry["mtime_ns"]:
            return self._verify(name, trust=False)
        self._unverified.discard(name)

    def _is_large(self, name: str) -> bool:
        return int(self.manifest["files"][name]["bytes"]) > blocks.LARGE

    def _damaged(self, name: str) -> Callable[[str], ArtifactError]:
        file = self.path / name
        return lambda what: ArtifactError(f"{file} was edited after it was made ({what})", self.path, "damaged")

    def _file(self, name: str) -> BinaryIO:
        """An open file, verified at its first use; a large one is left to its blocks."""
        if name not in self._files and name in self.manifest["files"]:
            raise ArtifactError(f"{self.path / name} was erased", self.path, "erased")
        if name in self._unverified:
            self._verify(name)
        return self._files[name]

    def blocks(self, name: str) -> Blocks | None:
        """The blocks of a large file; None for a small one, which is verified whole, and in runs that have none."""
        file, entry = self._file(name), self.manifest["files"][name]
        if "blocks" in entry and self._is_large(name) and name not in self._blocks:
            self._blocks[name] = Blocks(file, entry, self._damaged(name))
        return self._blocks.get(name)

    def _whole(self, name: str) -> BinaryIO:
        """An open file that was verified to its last byte."""
        if (found := self.blocks(name)) is not None:
            found.check()
        return self._file(name)

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

    def __contains__(self, name: str) -> bool:
        return name in self.manifest["files"]

    def array(self, name: str) -> Array:
        """A memory-mapped array; of a large one, blocks are verified as they are read (`CheckedArray`)."""
        if name not in self._arrays:
            self._arrays[name] = _mapped(self._file(name), self.blocks(name))
            if not self._is_large(name):
                self._files[name].close()  # the map is enough, and the files that may be open are few
        return self._arrays[name]

    def bytes(self, name: str) -> bytes:
        size: int = self.manifest["files"][name]["bytes"]
        return os.pread(self._whole(name).fileno(), size, 0) if size < 2**30 else self.file(name).read_bytes()

    def text(self, name: str) -> str:
        return self.bytes(name).decode("utf-8")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a safetensors file."""
        from safetensors.torch import load_file

        return load_file(self.file(name))

    def file(self, name: str) -> Path:
        """A path to the very file that was verified, for libraries that read by path; valid while the artifact is open.

        It has no suffix.
        """
        file = self._whole(name)
        file.seek(0)
        return Path(f"/dev/fd/{file.fileno()}")

    def check_in_place(self) -> None:
        """Refuse if another build has replaced this artifact: what was read by path since cannot be trusted."""
        try:
            there = manifest_fingerprint(read_manifest(self.path))
        except ArtifactError:
            there = ""
        if there != self.fingerprint:
            raise ArtifactError(
                f"{self.path} was replaced by another build while it was in use; run the same command again, or open "
                "the run again"
            )


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells whether the same artifact is still in its place."""
    try:
        status = (path / MANIFEST).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _folder(*folders: Path) -> int | None:
    """A descriptor of the first of these directories that is there."""
    for place in folders:
        try:
            return os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _beyond_limit(place, error) from None
    return None


def _opened(folder: int, path: Path, name: str) -> BinaryIO:
    """Open a file of the directory with descriptor `folder`, even if that directory was renamed."""
    try:
        return open(name, "rb", opener=lambda name, flags: os.open(name, flags, dir_fd=folder))
    except (FileNotFoundError, IsADirectoryError):
        fault: Fault = "missing" if name == MANIFEST else "damaged"
        raise ArtifactError(f"{path / name} is missing", path, fault) from None
    except OSError as error:
        raise _beyond_limit(path / name, error) from None


def _beyond_limit(path: Path, error: OSError) -> Exception:
    """What to say where a file cannot be opened because too many are open: nothing is wrong with the file."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return error
    return LimitError(
        f"{path} cannot be opened: this process may have no more open files; allow more (ulimit -n 65536), or build "
        "the run with larger segments (store.segment_tokens)"
    )


def _measure(path: Path, file: BinaryIO, entry: dict[str, Any]) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != entry["bytes"]:
        what = f"{path} has {size} bytes, but its manifest says {entry['bytes']}"
        raise ArtifactError(what, path.parent, "damaged")


def _sha256(file: BinaryIO) -> str:
    digest, place = hashlib.sha256(), 0
    while chunk := os.pread(file.fileno(), 2**20, place):
        digest.update(chunk)
        place += len(chunk)
    return digest.hexdigest()


def _mapped(file: BinaryIO, checked: Blocks | None) -> Array:
    """The array of an open .npy file, memory-mapped; the map keeps the file even if its name is removed."""
    if checked is not None:
        checked.check(0, 1)  # its header
    header = io.BytesIO(os.pread(file.fileno(), 2**16, 0))
    version = np.lib.format.read_magic(header)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(header)
    if 0 in shape:  # an empty file cannot be mapped
        return np.empty(shape, dtype)
    array = np.memmap(file, dtype, "r", header.tell(), shape, "F" if fortran else "C")
    return array if checked is None else cast(Array, CheckedArray(array, checked, header.tell()))
