"""Reading an artifact: all its files are opened and verified at once, so that they belong together."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gnnlm.artifact.files import sha256
from gnnlm.artifact.manifest import (
    MANIFEST,
    erased_files,
    manifest_fingerprint,
    named_parts,
    other_part,
    parse_manifest,
    read_manifest,
    rebuild_command,
    run_of,
)
from gnnlm.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor

TRUST_ABOVE = 64 * 2**20  # files larger than this are hashed again only when their time has changed
Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Artifact:
    """A complete artifact, its files checked against the manifest.

    All files are held open: a build that replaces the directory later does not change what is read here. `path` is
    for messages, and for files that must be read by path; `check_in_place` then checks that they were still these.
    The files of its parts are verified when each is first read, so that opening a large run reads little.
    """

    path: Path
    manifest: dict[str, Any]
    _files: dict[str, BinaryIO]
    parts: tuple[Artifact, ...] = ()
    _unverified: set[str] = field(default_factory=set)
    _arrays: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, verify: bool = True, trust: bool = True) -> Artifact:
        """Open and verify; refuse an artifact with a truncated, edited or missing file, or with another's part.

        Without `trust`, files that are large and whose time has not changed are hashed too.
        """
        artifact = cls._opened(path)
        if verify:
            artifact.verify(trust)
        artifact._unverified.clear()
        named = named_parts(artifact.manifest).items()
        return replace(artifact, parts=tuple(cls.open_part(path.parent / name, found, path) for name, found in named))

    @classmethod
    def open_part(cls, path: Path, fingerprint: str, whole: Path) -> Artifact:
        """Open a part of what is at `whole`; its files are verified when each is first read."""
        part = cls._opened(path)
        if part.fingerprint != fingerprint:
            raise ArtifactError(other_part(part.path, whole))
        return part

    @classmethod
    def _opened(cls, path: Path) -> Artifact:
        """Open and measure all files; they are verified later."""
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            raise ArtifactError(f"{path} does not exist yet; build it with gnnlm run") from None
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
        """Verify now what would be verified at its first use, in the parts too."""
        for name in sorted(self._unverified):
            self._verify(name, trust)
        for part in self.parts:
            part.verify(trust)

    def _verify(self, name: str, trust: bool = True) -> None:
        _verify(self.path / name, self._files[name], self.manifest["files"][name], trust)
        self._unverified.discard(name)

    def _file(self, name: str) -> BinaryIO:
        """An open file, verified at its first use."""
        if name not in self._files and name in self.manifest["files"]:
            raise ArtifactError(
                f"{self.path / name} was erased (see gnnlm history {run_of(self.path)}); serving does not need it, but "
                "this does: build another run from the text that is left"
            )
        if name in self._unverified:
            self._verify(name)
        return self._files[name]

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
        """A memory-mapped array."""
        if name not in self._arrays:
            self._arrays[name] = _mapped(self._file(name))
        return self._arrays[name]

    def bytes(self, name: str) -> bytes:
        size: int = self.manifest["files"][name]["bytes"]
        return os.pread(self._file(name).fileno(), size, 0) if size < 2**30 else self.file(name).read_bytes()

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
        file = self._file(name)
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


def _opened(folder: int, path: Path, name: str) -> BinaryIO:
    """Open a file of the directory with descriptor `folder`, even if that directory was renamed."""
    try:
        return open(name, "rb", opener=lambda name, flags: os.open(name, flags, dir_fd=folder))
    except (FileNotFoundError, IsADirectoryError):
        advice = "build it with gnnlm run" if name == MANIFEST else f"rebuild it: {rebuild_command(path)}"
        raise ArtifactError(f"{path / name} is missing; {advice}") from None
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise ArtifactError(
            f"{path / name} cannot be opened: this process may have no more open files; allow more (ulimit -n 65536), "
            "or build the run with larger segments (store.segment_tokens)"
        ) from None


def _measure(path: Path, file: BinaryIO, entry: dict[str, Any]) -> None:
    size, rebuild = os.fstat(file.fileno()).st_size, f"rebuild it: {rebuild_command(path.parent)}"
    if size != entry["bytes"]:
        raise ArtifactError(f"{path} has {size} bytes, but its manifest says {entry['bytes']}; {rebuild}")


def _verify(path: Path, file: BinaryIO, entry: dict[str, Any], trust: bool) -> None:
    stat, rebuild = os.fstat(file.fileno()), f"rebuild it: {rebuild_command(path.parent)}"
    if trust and stat.st_size > TRUST_ABOVE and stat.st_mtime_ns == entry["mtime_ns"]:
        return
    file.seek(0)
    if sha256(file) != entry["sha256"]:
        raise ArtifactError(f"{path} was edited after it was made (its checksum differs); {rebuild}")


def _mapped(file: BinaryIO) -> Array:
    """The array of an open .npy file, memory-mapped; the map keeps the file even if its name is removed."""
    with file:
        file.seek(0)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if 0 in shape:  # an empty file cannot be mapped
            return np.empty(shape, dtype)
        return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran else "C")
