"""The manifest of an artifact: what it is, what it was made from, and a checksum over all of that."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gnnlm.errors import ArtifactError, Fault, VersionError

FORMAT = 2
MANIFEST = "manifest.json"
ERASED = "erased.json"  # stands in an artifact some of whose files were erased for good, and names them
SHOWN = 3  # names that a message lists before it counts the rest


def plain(value: Any) -> Any:
    """A value as it comes back from a JSON file.

    >>> plain({"a": (1, 2)})
    {'a': [1, 2]}
    """
    return json.loads(json.dumps(value))


def fingerprint(value: object) -> str:
    """Sixteen hex digits that identify a JSON value.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_manifest(
    stage: str,
    inputs: object,
    facts: object,
    files: object,
    parts: Mapping[str, str],
    made_with: Mapping[str, Any],
) -> dict[str, Any]:
    manifest = {"format": FORMAT, "stage": stage, "inputs": inputs, "facts": facts, "files": files}
    more = {name: value for name, value in {"parts": parts, "made_with": made_with}.items() if value}
    read_back: dict[str, Any] = plain({**manifest, **more})
    return read_back


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its own checksum, as it is stored."""
    return {**manifest, "checksum": fingerprint(manifest)}


def draft_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def old_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def places(part: Path) -> tuple[Path, ...]:
    """Where a part may be found: in its place or, while the artifact that it belongs to is replaced, beside it."""
    return part, draft_path(part), old_path(part)


def standing(path: Path) -> Path:
    """Where the artifact of a place stands: there, or beside it in the moment in which another takes its place."""
    old = old_path(path)
    return old if not (path / MANIFEST).is_file() and (old / MANIFEST).is_file() else path


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the artifact at `path`; refused if it is damaged or of another format."""
    try:
        text = (standing(path) / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{path} has no {MANIFEST}: it is not built yet", path, "missing") from None
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path) -> dict[str, Any]:
    """The manifest that `text` holds, without its checksum."""
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        manifest = None
    if (found := other_format(manifest)) is not None:
        age = "an older" if found < FORMAT else "a newer"
        raise VersionError(
            f"{path} was made by {age} version of gnnlm (format {found}, this version reads {FORMAT})", path, "outdated"
        )
    if not _is_whole(manifest):
        fault: Fault = "unreadable" if listed_files(manifest) is None else "damaged"
        raise ArtifactError(f"{path / MANIFEST} is damaged (it was changed after it was written)", path, fault)
    return {name: value for name, value in manifest.items() if name != "checksum"}


def unsealed(record: object) -> dict[str, Any] | None:
    """A record without its checksum; None if it is not as it was when it was given that checksum.

    >>> unsealed({"a": 1, "checksum": fingerprint({"a": 1})}), unsealed({"a": 2, "checksum": fingerprint({"a": 1})})
    ({'a': 1}, None)
    """
    if not isinstance(record, dict):
        return None
    rest = {name: value for name, value in record.items() if name != "checksum"}
    try:
        return rest if record.get("checksum") == fingerprint(rest) else None
    except UnicodeEncodeError:  # half a surrogate pair
        return None


def _is_whole(manifest: object) -> bool:
    """Whether this is a manifest with the checksum that it was given, and with everything that readers rely on."""
    rest = unsealed(manifest)
    kinds = {"format": int, "stage": str, "inputs": dict, "facts": dict, "files": dict}
    if rest is None or not all(isinstance(rest.get(name), kind) for name, kind in kinds.items()):
        return False
    parts, files = rest.get("parts", {}), rest["files"].items()
    return (
        isinstance(parts, dict)
        and all(isinstance(part, str) for part in parts.values())
        and all(Path(name).name == name and _describes_a_file(entry) for name, entry in files)
    )


def _describes_a_file(entry: object) -> bool:
    kinds = {"bytes": int, "sha256": str, "mtime_ns": int}
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), kind) for name, kind in kinds.items()):
        return False
    blocks = entry.get("blocks", {"bytes": 1, "crc32": ""})
    if not isinstance(blocks, dict) or not isinstance(blocks.get("crc32"), str) or not isinstance(blocks["bytes"], int):
        return False
    count = -(-entry["bytes"] // blocks["bytes"]) if blocks["bytes"] > 0 else -1
    return "blocks" not in entry or re.fullmatch(f"[0-9a-f]{{{8 * count}}}", blocks["crc32"]) is not None


def other_format(manifest: object) -> int | None:
    """The format of a manifest that another version has written; None for any other manifest."""
    found = manifest.get("format") if isinstance(manifest, dict) else None
    return found if isinstance(found, int) and found != FORMAT else None


def listed_files(manifest: object) -> set[str] | None:
    """The files that a manifest of any format names, even a damaged one; None if it is no manifest of ours."""
    if not isinstance(manifest, dict) or not {"format", "stage", "inputs", "files"} <= manifest.keys():
        return None
    files = manifest["files"]
    return {name for name in files if Path(name).name == name} if isinstance(files, dict) else None


def named_parts(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The parts of an artifact, in order: the name of each, a path in the run directory, and its fingerprint."""
    parts: dict[str, str] = manifest.get("parts", {})
    return {
        name: found for name, found in parts.items() if not Path(name).is_absolute() and ".." not in Path(name).parts
    }


def erased_files(path: Path) -> frozenset[str]:
    """The files of the artifact at `path` that were erased for good; its manifest still tells what they were."""
    try:
        names = json.loads((path / ERASED).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def other_part(part: Path, path: Path) -> ArtifactError:
    return ArtifactError(f"{part} is not the part that {path} was made with", part, "damaged")


def manifest_fingerprint(manifest: Mapping[str, Any]) -> str:
    """The identity of an artifact: its inputs and its bytes, not when it was made or how long that took."""
    files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    parts = [named_parts(manifest)] if "parts" in manifest else []
    return fingerprint([manifest["format"], manifest["stage"], manifest["inputs"], files, *parts])


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
