"""The folders of a run directory, and which of them a path lies in."""

from __future__ import annotations

from pathlib import Path

SEGMENTS = "segments"  # segments of the run as it was built
ADDED = "added"  # segments that were made after that
REFITTED = "refitted"  # what was fitted again since, by generation


def run_of(path: Path) -> Path:
    """Return the run directory of an artifact, or of a part of one.

    >>> run_of(Path("runs/mine/store")), run_of(Path("runs/mine/segments/0000/states"))
    (PosixPath('runs/mine'), PosixPath('runs/mine'))
    >>> run_of(Path("mine/refitted/0003/tune")), run_of(Path("mine/refitted/0003/segments/0000/index"))
    (PosixPath('mine'), PosixPath('mine'))
    """
    root = path.parents[2] if path.parent.parent.name in (SEGMENTS, ADDED) else path.parent
    return root.parents[1] if _is_refit(root) else root


def part_name(number: int, kind: str) -> str:
    """Return where a part of a segment lies in the run directory.

    >>> part_name(3, "states")
    'segments/0003/states'
    """
    return f"{SEGMENTS}/{number:04d}/{kind}"


def is_refitted(path: Path) -> bool:
    """Return whether an artifact, or a part of one, belongs to a refit."""
    return _is_refit(path.parent) or _is_refit(path.parent.parent.parent)


def is_added(part: Path) -> bool:
    """Return whether a part belongs to a segment that was added."""
    return part.parent.parent.name == ADDED


def _is_refit(folder: Path) -> bool:
    return folder.parent.name == REFITTED and folder.name.isdigit()
