"""Where generations lie in a run directory: `generations/N.json`, and `CURRENT`, which holds a number and its check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gnnlm.artifact import disk, fingerprint, write_json, write_whole
from gnnlm.errors import ArtifactError
from gnnlm.generation.lease import Lease
from gnnlm.generation.record import Generation

FOLDER, CURRENT = "generations", "CURRENT"
DIGITS = 15  # of the number of a generation, at most


def current_number(root: Path) -> int:
    """Return the number of the generation that a run serves; 0 is the run as it was built."""
    try:
        text = (root / CURRENT).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    words = text.split()
    written = text.endswith(b"\n") and len(words) in (1, 2) and words[0].isdigit() and len(words[0]) <= DIGITS
    if not written or (len(words) == 2 and text != _naming(int(words[0])).encode()):
        shown = text[:20].decode("ascii", "replace")
        raise ArtifactError(
            f"{root / CURRENT} is damaged: expected the number of a generation (got {shown!r}); write the last "
            f"number in {root / FOLDER} into it, as a line of its own"
        )
    return int(words[0])


def _naming(number: int) -> str:
    """Return the content of CURRENT; the check keeps a flipped bit from serving documents that were removed since."""
    return f"{number} {fingerprint(number)[:8]}\n"


def generation_file(root: Path, number: int) -> Path:
    return root / FOLDER / f"{number}.json"


def read_generation(root: Path, number: int) -> Generation:
    """Return a generation by its number; generation 0, the run as it was built, has no record and no segments here."""
    if not number:
        return Generation()
    path = generation_file(root, number)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(
            f"{path} is missing, but {root / CURRENT} names it; put it back, or write the last number in {path.parent} "
            "into CURRENT"
        ) from None
    return Generation.parse(text, path)


def read_current(root: Path) -> Generation:
    """Return the generation that a run serves."""
    return read_generation(root, current_number(root))


def pinned(root: Path) -> tuple[Generation, Lease]:
    """Return the current generation, with a lease on it.

    After moving CURRENT, a writer removes what no lease names. So the lease is written first, and CURRENT is then read
    again; if CURRENT has moved, the lease moves too.
    """
    lease = Lease.take(root, current_number(root))
    while (now := current_number(root)) != lease.generation:
        lease.move(now)
    try:
        return read_generation(root, lease.generation), lease
    except ArtifactError:
        lease.release()
        raise


def commit(root: Path, generation: Generation) -> None:
    """Make a generation the current one: its record is on the disk before CURRENT names it."""
    path = generation_file(root, generation.number)
    disk.make_directories(path.parent)
    write_json(path, generation.as_json())
    write_whole(root / CURRENT, _naming(generation.number))


def forget_uncommitted(root: Path) -> None:
    """Remove records of generations that were never committed."""
    current = current_number(root)
    for path in (root / FOLDER).glob("*.json*"):
        number = path.name.partition(".")[0]
        if path.suffix == ".new" or (number.isdecimal() and int(number) > current):
            disk.remove_file(path)
    disk.remove_file(root / f"{CURRENT}.new")


def generations_of(root: Path) -> Iterator[Generation]:
    """Yield all generations that have a record, oldest first."""
    numbers = sorted(int(path.stem) for path in (root / FOLDER).glob("*.json") if path.stem.isdecimal())
    for number in numbers:
        if number <= current_number(root):
            with suppress(FileNotFoundError):
                yield Generation.parse(generation_file(root, number).read_bytes(), generation_file(root, number))
