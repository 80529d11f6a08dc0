"""The places of an artifact in a run directory, and what gnnlm may remove there: only what it made itself.

`X` is the artifact, `.X.partial` an unfinished build. A folder is ours when a manifest (or, in a build, the list of
its files) names everything in it; any other folder is refused, never removed.

A finished build and the artifact that it replaces change places in one step: there is no moment with nothing at `X`.
`.X.partial` then holds what was replaced, which the missing list of files tells from a build, and is removed. Where the
file system cannot do that, the replaced artifact is `.X.old` for a moment, and read there.

An artifact may have parts: artifacts of their own in `segments/`, which its manifest names. A finished part waits as
`.X.partial` until the artifact is finished too. Parts take their places first; those that they replace are removed
when the artifact has followed, and are read at `.X.partial` until then. So a reader finds the old artifact with its
parts or the new one with its own, whatever the moment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from gnnlm.artifact import disk
from gnnlm.artifact.file_io import telling, write_json
from gnnlm.artifact.json_record import fingerprint, plain, read_json
from gnnlm.artifact.manifest import (
    ERASED,
    MANIFEST,
    draft_path,
    erased_files,
    listed_files,
    old_path,
    other_format,
    other_part,
    places,
    read_manifest,
    standing,
)
from gnnlm.errors import ArtifactError

JOURNAL = "journal.json"
NAMES = "draft.json"  # the names of a build's own files, known before they exist
State = Literal["done", "stale", "half-done", "missing", "damaged"]


# -- ownership -----------------------------------------------------------------------------------------------------


def draft_names(folder: Path) -> set[str]:
    """Return the files and folders that a build records as its own; empty if the folder is no build of ours."""
    record = read_json(folder / NAMES)
    names = record.get("names") if isinstance(record, dict) and record == named(record.get("names")) else None
    return {NAMES, *(name for name in names if Path(name).name == name)} if isinstance(names, list) else set()


def named(names: object) -> dict[str, object]:
    """Return what a build records: its names, with a checksum."""
    return {"names": names, "checksum": fingerprint(names)}


def is_scratch(name: str) -> bool:
    """Return whether this is a temporary file of safetensors, which a kill leaves behind."""
    return re.fullmatch(r"\.tmp\w{6}", name) is not None


def _own_names(folder: Path) -> tuple[set[str], set[str]]:
    """Return our names in a folder: those of files, and those that may also be of folders."""
    named = listed_files(read_json(folder / MANIFEST))
    files = set() if named is None else {MANIFEST, ERASED, *named}
    built = folder.name.endswith(".partial")
    if named is None and not built:
        return files, set()
    drafted = draft_names(folder)  # in an artifact until it is removed, after a build has taken its place
    files |= {name for name in os.listdir(folder) if is_scratch(name)} if drafted else set()
    return files | {f"{name}.new" for name in drafted or ({NAMES} if built else ())}, drafted


def check_ours(folder: Path) -> None:
    """Refuse a folder that holds anything that gnnlm did not make."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = "a link" if folder.is_symlink() else "a file"
        raise ArtifactError(
            f"{folder} is {kind}, where gnnlm expects a folder of its own; move it elsewhere", folder, "no room"
        )
    strange = list(_strangers(folder)) if folder.is_dir() else []
    if strange:
        more = f" (and {len(strange) - 1} more)" if len(strange) > 1 else ""
        raise ArtifactError(
            f"{folder} holds {strange[0]}{more}, which gnnlm has no record of making, so it will not replace the "
            f"folder; move {strange[0]} elsewhere (or delete {folder}, if nothing in it is yours)",
            folder,
            "no room",
        )


def _strangers(folder: Path) -> Iterator[str]:
    files, either = _own_names(folder)
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name not in either and (entry.name not in files or entry.is_dir(follow_symlinks=False)):
            yield entry.name


def check_place(path: Path) -> None:
    """Refuse to build where something that gnnlm did not make would have to be removed."""
    for folder in (path, draft_path(path), old_path(path)):
        check_ours(folder)


def remove_ours(folder: Path) -> None:
    """Remove a folder of ours, name by name; the files that mark it as ours are removed last."""
    check_ours(folder)
    if not folder.is_dir():
        return
    for name in sorted(set().union(*_own_names(folder)) - {MANIFEST, NAMES}):
        disk.remove_tree(folder / name)
    disk.sync_directory(folder)  # or a power failure might leave files without what marks them as ours
    for name in (MANIFEST, NAMES):
        disk.remove_file(folder / name)
    disk.remove_directory(folder)


# -- state ---------------------------------------------------------------------------------------------------------


def damage(path: Path) -> str:
    """Return what is wrong with the artifact at `path` or its parts, or ""; files are measured, not hashed."""
    if found := _own_damage(path):
        return found
    for name, wanted in read_manifest(path).parts.items():
        part = path.parent / name
        if not any(_is(place, wanted) for place in places(part)):
            return _own_damage(part) or str(other_part(part, path))
    return ""


def _own_damage(path: Path) -> str:
    """Return what is wrong with the artifact at `path` without its parts, or ""."""
    try:
        manifest = read_manifest(path)
    except ArtifactError as error:
        return str(error)
    place = standing(path)
    gone = erased_files(path)
    for name, entry in manifest.files.items():
        if name in gone:
            continue
        try:
            size = (place / name).stat().st_size
        except FileNotFoundError:
            return f"{path / name} is missing"
        if size != entry.bytes:
            return f"{path / name} has {size} bytes, but its manifest says {entry.bytes}"
    return ""


def state_of(path: Path, inputs: Mapping[str, Any]) -> State:
    """Return whether the artifact at `path` exists, is complete and was made from `inputs`; files are not hashed."""
    place = standing(path)
    if (place / MANIFEST).is_file():
        if damage(path):
            return "stale" if other_format(read_json(place / MANIFEST)) is not None else "damaged"
        return "done" if read_manifest(path).inputs == plain(dict(inputs)) else "stale"
    return "half-done" if draft_path(path).is_dir() else "missing"


# -- moving into place ---------------------------------------------------------------------------------------------


def settle(path: Path) -> None:
    """Move a finished build into place, also one whose process was killed before it could, and clean up after it."""
    if is_finished(path):
        check_place(path)
        parts = {path.parent / name: found for name, found in read_manifest(draft_path(path)).parts.items()}
        waiting = [part for part, found in parts.items() if is_finished(part) and _is(draft_path(part), found)]
        if not all(_is(part, found) for part, found in parts.items() if part not in waiting):
            return
        for place in (*waiting, path):
            _take_place(place)
    _tidy(path)


def is_finished(path: Path) -> bool:
    """Return whether a whole build waits beside a place; a replaced artifact there has no list of its files."""
    folder = draft_path(path)
    nothing_replaced = not (folder / NAMES).exists() and not (path / MANIFEST).is_file()
    return (bool(draft_names(folder)) or nothing_replaced) and (folder / MANIFEST).is_file() and not _own_damage(folder)


def _is(path: Path, fingerprint: str) -> bool:
    return not _own_damage(path) and read_manifest(path).fingerprint == fingerprint


def _take_place(path: Path) -> None:
    """Move a finished build to its place in one step; leave what it replaces beside it."""
    folder, old = draft_path(path), old_path(path)
    if not path.exists():
        disk.rename(folder, path)
    elif not disk.exchange(folder, path):
        remove_ours(old)
        disk.rename(path, old)
        disk.rename(folder, path)
    disk.sync_directory(path.parent)


def _tidy(path: Path) -> None:
    """Remove the leftovers of a build that is in its place: its own records, and what it replaced."""
    try:
        parts = [path.parent / name for name in read_manifest(path).parts]
    except ArtifactError:
        return
    for place in (path, *parts):
        with suppress(OSError, ArtifactError):  # the artifact is in place; leftovers are removed the next time
            _tidy_place(place)


def _tidy_place(place: Path) -> None:
    if not (place / MANIFEST).is_file():
        return
    if (place / NAMES).is_file():
        for name in sorted(draft_names(place) - {MANIFEST, ERASED, NAMES, *read_manifest(place).files}):
            disk.remove_tree(place / name)
        for name in [*(f"{name}.new" for name in sorted(draft_names(place))), *filter(is_scratch, os.listdir(place))]:
            disk.remove_file(place / name)
        disk.sync_directory(place)
        disk.remove_file(place / NAMES)
    replaced = draft_path(place)
    if (replaced / MANIFEST).is_file() and not (replaced / NAMES).is_file():
        remove_ours(replaced)
    remove_ours(old_path(place))


def link_artifact(source: Path, place: Path, parts: bool = True) -> None:
    """Link an artifact with its parts into another place; copy files that the file system cannot link.

    Without `parts`, they are left to the caller.
    """
    manifest = read_manifest(source)
    for part in manifest.parts if parts else ():
        link_artifact(source.parent / part, place.parent / part)
    gone = erased_files(source)
    names = [name for name in manifest.files if name not in gone] + ([ERASED] if gone else [])
    folder = draft_path(place)
    disk.make_directory(folder)
    write_json(folder / NAMES, named([*names, MANIFEST]))
    for name in names:
        _link(source / name, folder / name)
    disk.sync_directory(folder)
    _link(source / MANIFEST, folder / MANIFEST)
    disk.sync_directory(folder)
    if parts:
        settle(place)
    else:
        _take_place(place)
        _tidy_place(place)


def _link(source: Path, place: Path) -> None:
    try:
        disk.link(source, place)
    except OSError:
        with telling(place):
            disk.copy(source, place)


def remove_other_parts(path: Path, candidates: Iterable[Path]) -> None:
    """Remove those of the `candidates` that are no parts of the artifact at `path`, and unfinished builds of all.

    The folders that hold them go too when nothing is left in them.
    """
    parts = {path.parent / name for name in read_manifest(path).parts}
    for part in candidates:
        with suppress(OSError, ArtifactError):  # what is not ours stays
            for folder in (draft_path(part), old_path(part), *([] if part in parts else [part])):
                remove_ours(folder)
            disk.remove_directory(part.parent)  # if it is empty
            disk.remove_directory(part.parent.parent)


def bytes_of(*places: Path) -> int:
    """Return the size of the artifacts at these places, unfinished builds included."""
    size = 0
    for folder in (folder for place in places for folder in (place, draft_path(place))):
        for file in folder.rglob("*"):
            with suppress(FileNotFoundError):  # another process is building there
                size += file.stat().st_size if file.is_file() else 0
    return size
