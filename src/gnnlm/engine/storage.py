"""Storage that every machine can reach, but not map: any fsspec path, such as s3://bucket/folder.

Files are named by their content, so a file is uploaded once and never changes. A machine downloads what it needs to its
own disk and links the copies into a run directory. Results are uploaded as one file for each task.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gnnlm.artifact import disk, file_digest, fingerprint
from gnnlm.artifact.manifest import ERASED, MANIFEST, erased_files, read_manifest
from gnnlm.errors import ArtifactError, EngineError

SCRATCH = "GNNLM_SCRATCH"  # the environment variable that names a machine's folder for copies


@dataclass(frozen=True)
class RunView:
    """Some files of a run directory: the checksum of each, by its path."""

    files: Mapping[str, str]

    @classmethod
    def of(cls, root: Path, names: Iterable[str]) -> RunView:
        """Return all files at these paths; the checksums of an artifact's files come from its manifest."""
        files: dict[str, str] = {}
        for name in names:
            path = root / name
            if path.is_file():
                files[name] = file_digest(path)
            elif path.is_dir():
                known = read_manifest(path).files
                gone = erased_files(path)
                files |= {f"{name}/{file}": entry.sha256 for file, entry in known.items() if file not in gone}
                for file in (MANIFEST, *([ERASED] if gone else [])):
                    files[f"{name}/{file}"] = file_digest(path / file)
        return cls(files)

    @property
    def name(self) -> str:
        return fingerprint(dict(self.files))


@dataclass(frozen=True)
class Storage:
    """A folder reached through fsspec."""

    url: str

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        import fsspec

        try:
            system, path = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError, OSError) as error:
            words = " ".join(str(error).split())
            raise EngineError(f"--storage {self.url} cannot be used: {words}") from error
        return system, str(path).rstrip("/")

    def __reduce__(self) -> tuple[type[Storage], tuple[str]]:
        return Storage, (self.url,)  # connections stay where they are

    def upload(self, root: Path, view: RunView) -> None:
        """Upload the files of a view that are not in the storage yet."""
        for name, digest in view.files.items():
            if not self.has(f"files/{digest}"):
                self.put(root / name, f"files/{digest}")

    def download(self, view: RunView) -> Path:
        """Return a run directory on this machine with the files of a view."""
        scratch = scratch_folder()
        root = scratch / "runs" / view.name
        if root.is_dir():
            return root
        beside = root.with_name(f"{view.name}.{uuid.uuid4().hex[:8]}.new")
        for name, digest in view.files.items():
            copy, place = scratch / "files" / digest, beside / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if copy.exists():
                os.link(copy, place)
                continue
            self.get(f"files/{digest}", place)
            if file_digest(place) != digest:
                shutil.rmtree(beside)
                raise ArtifactError(f"{self.url}/files/{digest} is damaged; delete it there and run again")
            copy.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # a copy is never replaced: another process may be linking it just now
                os.link(place, copy)
        try:
            beside.rename(root)
        except OSError:  # another process of this machine was faster
            shutil.rmtree(beside)
        return root

    def has(self, name: str) -> bool:
        system, base = self._opened
        with self._trouble():
            return bool(system.exists(f"{base}/{name}"))

    def put(self, path: Path, name: str) -> None:
        """Upload a file, which gets its name only when it is whole."""
        system, base = self._opened
        beside = f"{base}/{name}.{uuid.uuid4().hex[:8]}.new"
        with self._trouble():
            system.makedirs(os.path.dirname(beside), exist_ok=True)
            system.put_file(str(path), beside)
            system.mv(beside, f"{base}/{name}")

    def get(self, name: str, path: Path) -> None:
        """Download a file, which gets its name only when it is whole."""
        system, base = self._opened
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.new")
        with self._trouble():
            system.get_file(f"{base}/{name}", str(beside))
        disk.sync_file(beside)
        disk.rename(beside, path)

    def remove(self, name: str) -> None:
        system, base = self._opened
        with self._trouble():
            if system.exists(f"{base}/{name}"):
                system.rm(f"{base}/{name}", recursive=True)

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            words = " ".join(str(error).split())[:200]
            raise EngineError(
                f"{self.url} cannot be read or written ({words}); check the address and your access to it, and run the "
                "same command again: it resumes where it stopped"
            ) from error


def scratch_folder() -> Path:
    """Return this machine's folder for copies."""
    return Path(os.environ.get(SCRATCH) or Path(tempfile.gettempdir()) / f"gnnlm-scratch-{os.getuid()}")
