"""The manifest of an artifact: what it is, what it was made from, and a checksum over all of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gnnlm.artifact.json_record import fingerprint, parse_json, plain, read_json, sealed, unsealed
from gnnlm.errors import ArtifactError, Fault, VersionError

FORMAT = 3
MANIFEST = "manifest.json"
ERASED = "erased.json"  # names the files of an artifact that were erased for good
SHOWN = 3  # names that a message lists before it counts the rest


class BlockDigests(BaseModel):
    """The CRC-32 of each block of a large file, in hex digits; `bytes` is the size of a block."""

    model_config = ConfigDict(frozen=True, strict=True)

    bytes: Annotated[int, Field(gt=0)]
    crc32: Annotated[str, Field(pattern=r"^([0-9a-f]{8})*$")]


class FileEntry(BaseModel):
    """The size, digest and time of a file; large files have a digest of each block."""

    model_config = ConfigDict(frozen=True, strict=True)

    bytes: int
    sha256: str
    mtime_ns: int
    blocks: BlockDigests | None = None

    @model_validator(mode="after")
    def _has_all_blocks(self) -> FileEntry:
        if self.blocks is not None and len(self.blocks.crc32) != 8 * -(-self.bytes // self.blocks.bytes):
            raise ValueError("expected a digest of each block")
        return self


def _file_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError("expected the name of a file in the artifact's folder")
    return name


def _path_below(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError("expected a path below the run directory")
    return name


class Manifest(BaseModel):
    """What an artifact is and what it was made from.

    `parts` has the fingerprint of each part by its path in the run directory, in order. `made_with` is no input, but
    may show in the last bit of a number.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    format: int
    stage: str
    inputs: dict[str, Any]
    facts: dict[str, Any]
    files: dict[Annotated[str, AfterValidator(_file_name)], FileEntry]
    parts: dict[Annotated[str, AfterValidator(_path_below)], str] = {}
    made_with: dict[str, Any] = {}

    @property
    def fingerprint(self) -> str:
        """The identity of an artifact: its inputs and its bytes, not when it was made or how long that took."""
        files = {name: entry.sha256 for name, entry in self.files.items()}
        parts = [self.parts] if self.parts else []
        return fingerprint([self.format, self.stage, self.inputs, files, *parts])

    def as_json(self) -> dict[str, Any]:
        """Return the manifest as it is stored, with its checksum."""
        record = self.model_dump(exclude={name for name in ("parts", "made_with") if not getattr(self, name)})
        record["files"] = {name: entry.model_dump(exclude_none=True) for name, entry in self.files.items()}
        return sealed(plain(record))


def draft_path(path: Path) -> Path:
    """Return where the artifact at `path` is built."""
    return path.with_name(f".{path.name}.partial")


def old_path(path: Path) -> Path:
    """Return where a replaced artifact is for a moment, if the file system cannot exchange two folders."""
    return path.with_name(f".{path.name}.old")


def places(part: Path) -> tuple[Path, ...]:
    """Return where a part may be: in its place or, while the artifact that it belongs to is replaced, beside it."""
    return part, draft_path(part), old_path(part)


def standing(path: Path) -> Path:
    """Return where the artifact at `path` is: there, or beside it in the moment in which another takes its place."""
    old = old_path(path)
    return old if not (path / MANIFEST).is_file() and (old / MANIFEST).is_file() else path


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the artifact at `path`; refuse a damaged one, and other formats."""
    try:
        text = (standing(path) / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path} has no {MANIFEST}: it is not built yet", path, "missing") from None
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """Return the manifest in `text`, which was read at `path`; refuse a damaged one, and other formats."""
    record = parse_json(text)
    if (found := other_format(record)) is not None:
        age = "an older" if found < FORMAT else "a newer"
        raise VersionError(
            f"{path} was made by {age} version of gnnlm (format {found}, this version reads {FORMAT})", path, "outdated"
        )
    try:
        return Manifest.model_validate(unsealed(record))
    except ValidationError:
        fault: Fault = "unreadable" if listed_files(record) is None else "damaged"
        raise ArtifactError(
            f"{path / MANIFEST} is damaged (it was changed after it was written)", path, fault
        ) from None


def other_format(record: object) -> int | None:
    """Return the format of a manifest that another version has written; None for any other record."""
    found = record.get("format") if isinstance(record, dict) else None
    return found if isinstance(found, int) and found != FORMAT else None


def listed_files(record: object) -> set[str] | None:
    """Return the files that a manifest of any format names, even a damaged one; None if it is no manifest of ours."""
    if not isinstance(record, dict) or not {"format", "stage", "inputs", "files"} <= record.keys():
        return None
    files = record["files"]
    return {name for name in files if Path(name).name == name} if isinstance(files, dict) else None


def erased_files(path: Path) -> frozenset[str]:
    """Return the files of the artifact at `path` that were erased for good; its manifest still describes them."""
    record = read_json(path / ERASED)
    names = record.get("files") if isinstance(record, dict) else None
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def other_part(part: Path, path: Path) -> ArtifactError:
    return ArtifactError(f"{part} is not the part that {path} was made with", part, "damaged")


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two sets of inputs, both sides named.

    >>> differences({"gnn.layers": 3, "seed": 0}, {"gnn.layers": 2, "seed": 0})
    'gnn.layers was 3, is now 2'
    >>> differences({"text": {"a.txt": "1", "b.txt": "2"}}, {"text": {"a.txt": "3", "c.txt": "2"}})
    'text: changed a.txt, added c.txt, removed b.txt'
    """
    keys = [key for key in dict.fromkeys([*was, *now]) if was.get(key) != now.get(key)]
    return "; ".join(_difference(key, was.get(key), now.get(key)) for key in keys)


def _difference(key: str, was: object, now: object) -> str:
    if not isinstance(was, dict) or not isinstance(now, dict):
        return f"{key} was {_show(was)}, is now {_show(now)}"
    kinds = {
        "changed": [name for name in was if name in now and was[name] != now[name]],
        "added": [name for name in now if name not in was],
        "removed": [name for name in was if name not in now],
    }
    return f"{key}: " + ", ".join(f"{kind} {some_of(names)}" for kind, names in kinds.items() if names)


def some_of(names: Iterable[str]) -> str:
    """
    >>> some_of("abcde")
    'a, b, c and 2 more'
    """
    listed = list(names)
    shown = ", ".join(listed[:SHOWN])
    return shown if len(listed) <= SHOWN else f"{shown} and {len(listed) - SHOWN} more"


def _show(value: object) -> str:
    if isinstance(value, dict):
        return f"{len(value)} files"
    text = "not set" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
