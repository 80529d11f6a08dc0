"""Text files: which files of a folder are text, and what text a file holds.

Knows nothing of documents, splits or tokens.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gnnlm.config.corpus_config import SUFFIXES
from gnnlm.corpus.markup import html_text
from gnnlm.errors import CorpusError

HTML = (".html", ".htm")
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
SUFFIXES_SHOWN = 5


class Unreadable(CorpusError):
    """A file that cannot be read as text; `corpus.skip_unreadable` skips it."""


@dataclass
class FolderContents:
    """The text files of a folder, and what else is in it."""

    files: list[Path] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # files of other kinds, by suffix
    special: int = 0  # pipes, devices, links that lead nowhere
    links: int = 0  # linked folders, which are not followed: they may lead back

    def left_out(self) -> str:
        """Describe what was not read; empty if everything was.

        >>> FolderContents(skipped=Counter({".png": 2, "": 1}), links=1).left_out()
        '3 files of other kinds (2 .png, 1 without a suffix) and 1 linked folder'
        """
        shown = [f"{count} {suffix or 'without a suffix'}" for suffix, count in self.skipped.most_common()]
        more = len(shown) - SUFFIXES_SHOWN
        shown = shown[:SUFFIXES_SHOWN] + ([f"{more} more kinds"] if more > 0 else [])
        parts = [
            (self.skipped.total(), "file{} of other kinds" + f" ({', '.join(shown)})"),
            (self.special, "special file{} (pipes, devices or broken links)"),
            (self.links, "linked folder{}"),
        ]
        return " and ".join(f"{count:,} {words.format('' if count == 1 else 's')}" for count, words in parts if count)


def find_files(root: Path, leave_out: Path | None = None, suffixes: Iterable[str] | None = None) -> FolderContents:
    """Return the text files of a folder, or the file itself.

    Hidden files and folders are not looked at, nor is the folder `leave_out`. Linked folders are not followed.
    """
    wanted = tuple(suffix.lower() for suffix in suffixes or SUFFIXES)
    accepted = f"a file ending in {', '.join(wanted)} (or .gz of these)"
    mode = _mode(root)
    if stat.S_ISREG(mode):
        if _suffix(root.name, wanted) is None:
            raise CorpusError(f"{cited(root)}: expected {accepted}; to read other files as text, set corpus.suffixes")
        return FolderContents([root])
    if not stat.S_ISDIR(mode):
        raise CorpusError(f"{cited(root)} is a pipe or a device; expected a file or a folder of text")
    found = FolderContents()
    barred = None if leave_out is None else os.path.realpath(leave_out)
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if barred is not None and _is_within(folder, barred):
            folders.clear()
            continue
        found.links += sum(os.path.islink(os.path.join(folder, name)) for name in folders)
        for name in names:
            if not name.startswith("."):
                _sort_in(found, Path(folder, name), wanted, barred)
    found.files.sort()
    if not found.files:
        other = found.left_out()
        raise CorpusError(
            f"{cited(root)} holds no {accepted.removeprefix('a ')}"
            + (f", only {other}" if other else "")
            + "; give another folder, or say with corpus.suffixes what to read"
        )
    return found


def list_files(root: Path, leave_out: Path | None = None, suffixes: Iterable[str] | None = None) -> list[Path]:
    """Return the text files of a folder, or the file itself, in the order of their names."""
    return find_files(root, leave_out, suffixes).files


def _sort_in(found: FolderContents, path: Path, wanted: tuple[str, ...], barred: str | None) -> None:
    if _suffix(path.name, wanted) is None:
        found.skipped[cited(Path(path.name.lower().removesuffix(".gz")).suffix)] += 1
    elif not os.path.isfile(path):
        found.special += 1
    elif barred is None or not path.is_symlink() or not _is_within(path, barred):
        found.files.append(path)


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        raise CorpusError(f"{cited(path)} does not exist; expected a file or a folder of text") from None
    except (OSError, ValueError) as error:
        raise CorpusError(f"{cited(path)} cannot be read: {reason_of(error)}; check the path") from error


def _refuse(error: OSError) -> None:
    folder = cited(str(error.filename))
    raise CorpusError(f"the folder {folder} cannot be read: {reason_of(error)}; check its permissions") from error


def _is_within(path: str | Path, folder: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(folder)


def _suffix(name: str, wanted: Iterable[str]) -> str | None:
    """Return the wanted suffix that a file name ends in, `.gz` aside."""
    plain = name.lower().removesuffix(".gz")
    return next((suffix for suffix in wanted if plain.endswith(suffix)), None)


def cited(path: str | Path) -> str:
    """Return a path as text that can be printed and stored; bytes that are not UTF-8 are written as escapes.

    >>> cited("caf\\udce9.txt")
    'caf\\\\xe9.txt'
    """
    try:
        data = os.fsencode(path)
    except UnicodeEncodeError:  # not the name of any file
        data = str(path).encode("utf-8", "backslashreplace")
    return data.decode("utf-8", "backslashreplace")


def expanded(path: str) -> Path:
    """Return a path with `~` replaced by the home directory, where there is one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def reason_of(error: Exception) -> str:
    """Return the system's message about a failed operation, in one line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def is_json_lines(path: Path) -> bool:
    return _suffix(path.name, (".jsonl",)) is not None


def read_bytes(path: Path) -> bytes:
    """Read a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{cited(path)} cannot be read ({reason_of(error)})") from error


def read_text(path: Path, encoding: str) -> str:
    """Read the text of a file: unpacked, decoded, and without markup if it is HTML."""
    data = read_bytes(path)
    if path.name.lower().endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise Unreadable(f"{cited(path)} is not a whole gzip file ({reason_of(error)})") from error
    text = _decoded(path, data, encoding)
    if "\0" in text:
        raise Unreadable(f"{cited(path)} holds NUL characters, so it is not {encoding} text (UTF-16, or a binary file)")
    if _suffix(path.name, HTML) is None:
        return text
    try:
        return html_text(text)
    except ValueError as error:
        raise Unreadable(f"{cited(path)} is not HTML that can be read ({reason_of(error)})") from error


def _decoded(path: Path, data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding).removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        hint = " (its first bytes look like utf-16)" if data.startswith(UTF_16_MARKS) else ""
        raise Unreadable(
            f"{cited(path)} is not {encoding}: byte 0x{data[error.start]:02x} at offset {error.start}{hint}"
        ) from error
    except (LookupError, ValueError) as error:
        raise CorpusError(f"corpus.encoding: expected a text encoding such as utf-8 (got {encoding!r})") from error
