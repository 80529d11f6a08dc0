"""Where documents come from: a file, a folder, or the documentation of the running Python.

Knows nothing of splits or tokens.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gnnlm.corpus.document import Document
from gnnlm.corpus.python_docs import python_texts
from gnnlm.corpus.text_files import Unreadable, cited, find_files, is_json_lines, list_files, read_bytes, read_text
from gnnlm.errors import CorpusError
from gnnlm.progress import say, warn

PYTHON_DOCS = "python-docs"


def read_documents(
    source: str,
    encoding: str = "utf-8",
    skip_unreadable: bool = False,
    leave_out: Path | None = None,
    by_line: bool = False,
    suffixes: Iterable[str] | None = None,
) -> list[Document]:
    """Return all documents of a source that have any text in them, in the order of their names.

    `leave_out` is a folder that is not read even if it lies inside the source: the run directory. `by_line` makes
    every line of a text file a document of its own. `suffixes` says which files of a folder are text.
    """
    if source == PYTHON_DOCS:
        return [Document(name, text) for name, text in python_texts()]
    root = Path(source)
    found = find_files(root, leave_out, suffixes)
    if left_out := found.left_out():
        say(f"corpus: {cited(root)}: text files: {len(found.files):,}; not read: {left_out} (see corpus.suffixes)")
    documents: list[Document] = []
    for file in found.files:
        try:
            text = read_text(file, encoding)
        except Unreadable as error:
            if not skip_unreadable:
                raise CorpusError(
                    f"{error}; convert it, set corpus.encoding, or leave it out with corpus.skip_unreadable: true"
                ) from error
            warn(f"{error}; left out")
            continue
        documents.extend(_documents(_name(file, root), text, is_json_lines(file), by_line))
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise CorpusError(
            f"{cited(root)} holds no text: {len(found.files):,} files, all of them empty or left out; give other files"
        )
    return documents


def source_fingerprint(
    source: str, leave_out: Path | None = None, suffixes: Iterable[str] | None = None
) -> dict[str, str]:
    """Return a digest of each of the source's files, by the name it is cited by: changes whenever the text does."""
    if source == PYTHON_DOCS:
        return {PYTHON_DOCS: f"{platform.python_implementation()} {platform.python_version()}"}
    root = Path(source)
    digests = {}
    for file in list_files(root, leave_out, suffixes):
        name = cited(file.name if file == root else file.relative_to(root).as_posix())
        try:
            digests[name] = hashlib.sha256(read_bytes(file)).hexdigest()[:16]
        except Unreadable:  # reading refuses it or leaves it out, as the config says
            digests[name] = "unreadable"
    return digests


def check_text(text: str, what: str) -> None:
    """Refuse text that cannot be written as UTF-8: no tokenizer reads half of a surrogate pair.

    `what` says in the message which text it is.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{what}: character {error.start} is half of a surrogate pair (U+{ord(text[error.start]):04X}); expected "
            "whole characters: replace or remove it"
        ) from error


def _name(file: Path, root: Path) -> str:
    """Return the name that documents of a file are cited by."""
    return cited(file.name if file == root else file.relative_to(root).as_posix())


def _documents(name: str, text: str, is_json: bool, by_line: bool) -> Iterator[Document]:
    if is_json:
        yield from _json_lines(name, text)
        return
    check_text(text, name)  # some encodings can spell half of a surrogate pair
    if by_line:
        yield from (Document(f"{name}:{number}", line) for number, line in enumerate(text.split("\n"), start=1))
    else:
        yield Document(name, text)


def _json_lines(name: str, text: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            record = json.loads(line)
            body = record["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorpusError(f'{place}: expected a JSON object with a "text" field (got {line[:40]!r})') from error
        if not isinstance(body, str):
            raise CorpusError(f'{place}: expected "text" to be a string (got {type(body).__name__})')
        check_text(body, f"{place}, text")
        yield Document(f"{name}:{_title(record, place) or number}", body)


def _title(record: dict[str, Any], place: str) -> str | None:
    """Return the name, title or id of a JSON record, if it has one."""
    for key in ("name", "title", "id"):
        value = record.get(key)
        if isinstance(value, str | int | float):
            check_text(str(value), f"{place}, {key}")
            return str(value)
    return None
