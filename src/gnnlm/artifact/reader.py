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

from gnnlm.artifact.blocks import Array, Blocks, CheckedArray
from gnnlm.artifact.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    erased_files,
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
    """A complete artifact whose files match its manifest.

    All files are held open: a build that replaces the directory later does not change what is read here. `path` is
    for messages, and for files that must be read by path; `check_in_place` then checks that they were still these.
    The files of its parts are verified when each is first read, and large files block by block, so that opening a large
    run reads little.
    """

    path: Path
    manifest: Manifest
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
                artifact = cls._open_folder(path, path, old_path(path), path)
                named = artifact.manifest.parts.items()
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
        """Open a part of the artifact at `whole`; its files are verified when each is first read.

        While a build replaces the artifact, the part may be beside its place.
        """
        failed: list[ArtifactError] = []
        for folder in (*places(place), place):
            try:
                part = cls._open_folder(place, folder)
                if part.fingerprint == fingerprint:
                    return part
                failed.append(other_part(place, whole))
            except ArtifactError as error:
                failed.append(error)
        raise failed[-1]

    @classmethod
    def _open_folder(cls, path: Path, *folders: Path) -> Artifact:
        """Open and measure all files of the artifact at `path`, in the first of the folders that exists."""
        folder = _folder(*folders)
        if folder is None:
            raise ArtifactError(f"{path} does not exist yet", path, "missing")
        try:
            with _opened(folder, path, MANIFEST) as file:
                manifest = parse_manifest(file.read(), path)
            gone = erased_files(path)
            files = {name: _opened(folder, path, name) for name in manifest.files if name not in gone}
        finally:
            os.close(folder)
        for name, file in files.items():
            _measure(path / name, file, manifest.files[name])
        return cls(path, manifest, files, _unverified=set(files))

    def verify(self, trust: bool = True) -> None:
        """Verify now what would be verified when first read, in the parts too; without `trust`, hash every byte."""
        for name in sorted(self._unverified if trust else self._files):
            if not self._files[name].closed:  # a closed file was hashed when it was mapped
                self._verify(name, trust)
        for part in self.parts:
            part.verify(trust)

    def _verify(self, name: str, trust: bool = True) -> None:
        entry = self.manifest.files[name]
        if (not trust or entry.blocks is None) and _sha256(self._files[name]) != entry.sha256:
            raise self._damaged(name)("its checksum differs")
        self._unverified.discard(name)

    def _damaged(self, name: str) -> Callable[[str], ArtifactError]:
        file = self.path / name
        return lambda what: ArtifactError(f"{file} was edited after it was made ({what})", self.path, "damaged")

    def _file(self, name: str) -> BinaryIO:
        """Return an open file, verified when first used; a large file is verified by its blocks."""
        if name not in self._files and name in self:
            raise ArtifactError(f"{self.path / name} was erased", self.path, "erased")
        if name in self._unverified:
            self._verify(name)
        return self._files[name]

    def blocks(self, name: str) -> Blocks | None:
        """Return the blocks of a large file; None for a small one, which is verified whole."""
        file, entry = self._file(name), self.manifest.files[name]
        if entry.blocks is not None and name not in self._blocks:
            self._blocks[name] = Blocks(file, entry.bytes, entry.blocks, self._damaged(name))
        return self._blocks.get(name)

    def _whole(self, name: str) -> BinaryIO:
        """Return an open file that is verified to its last byte."""
        if (found := self.blocks(name)) is not None:
            found.check()
        return self._file(name)

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts

    @property
    def inputs(self) -> dict[str, Any]:
        return self.manifest.inputs

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.files

    def array(self, name: str) -> Array:
        """Return a memory-mapped array; blocks of a large one are verified as they are read (`CheckedArray`)."""
        if name not in self._arrays:
            checked = self.blocks(name)
            self._arrays[name] = _mapped(self._file(name), checked)
            if checked is None:
                self._files[name].close()  # the map is enough, and a process may hold few files open
        return self._arrays[name]

    def bytes(self, name: str) -> bytes:
        size = self.manifest.files[name].bytes
        return os.pread(self._whole(name).fileno(), size, 0) if size < 2**30 else self.file(name).read_bytes()

    def text(self, name: str) -> str:
        return self.bytes(name).decode("utf-8")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file."""
        from safetensors.torch import load_file  # imports torch

        return load_file(self.file(name))

    def file(self, name: str) -> Path:
        """Return a path to the very file that was verified, for libraries that read by path.

        The path is valid while the artifact is open, and has no suffix.
        """
        file = self._whole(name)
        file.seek(0)
        return Path(f"/dev/fd/{file.fileno()}")

    def check_in_place(self) -> None:
        """Refuse if another build has replaced this artifact: what was read by path since cannot be trusted."""
        try:
            there = read_manifest(self.path).fingerprint
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


def _measure(path: Path, file: BinaryIO, entry: FileEntry) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != entry.bytes:
        raise ArtifactError(f"{path} has {size} bytes, but its manifest says {entry.bytes}", path.parent, "damaged")


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
