"""Where documents come from: a file, a folder, or the documentation of the running Python.

Knows nothing of splits or tokens.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib.util
import inspect
import json
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gnnlm.errors import CorpusError
from gnnlm.progress import warn

SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
PYTHON_DOCS = "python-docs"
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """A text with the name it is cited by."""

    name: str
    text: str


@dataclass(frozen=True)
class Documents:
    """Documents that can be gone through more than once, without holding them all."""

    count: int
    open: Callable[[], Iterator[Document]]

    @classmethod
    def listed(cls, documents: list[Document]) -> Documents:
        return cls(len(documents), lambda: iter(documents))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Document]:
        return self.open()


def read_documents(
    source: str,
    encoding: str = "utf-8",
    skip_unreadable: bool = False,
    leave_out: Path | None = None,
    by_line: bool = False,
) -> list[Document]:
    """All documents of a source with any text in them, in the order of their names.

    `leave_out` is a folder that is not read even where it lies inside the source: the run directory. `by_line` makes
    every line of a text file a document of its own.
    """
    if source == PYTHON_DOCS:
        return list(_python_documents())
    root = Path(source)
    files = list_files(root, leave_out)
    documents: list[Document] = []
    for file in files:
        name = file.name if file == root else file.relative_to(root).as_posix()
        try:
            text = _read_text(file, encoding)
        except UnicodeDecodeError as error:
            where = f"{file} is not {encoding}: byte 0x{error.object[error.start]:02x} at offset {error.start}"
            if not skip_unreadable:
                raise CorpusError(
                    f"{where}; convert it, set corpus.encoding, or leave it out with corpus.skip_unreadable: true"
                ) from error
            warn(f"{where}; left out")
            continue
        if ".jsonl" in file.suffixes:
            documents.extend(_json_lines(name, text))
        elif by_line:
            documents.extend(Document(f"{name}:{n}", line) for n, line in enumerate(text.split("\n"), start=1))
        else:
            documents.append(Document(name, text))
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise CorpusError(
            f"{source} holds no text: {len(files)} files, all empty or left out; point corpus.source at other files"
        )
    return documents


def source_fingerprint(source: str, leave_out: Path | None = None) -> dict[str, str]:
    """A digest of each of the source's files, by the name it is cited by: changes whenever the text does."""
    if source == PYTHON_DOCS:
        return {PYTHON_DOCS: f"{platform.python_implementation()} {platform.python_version()}"}
    root, digests = Path(source), {}
    for file in list_files(root, leave_out):
        name = file.name if file == root else file.relative_to(root).as_posix()
        shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        digests[shown] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return digests


def list_files(root: Path, leave_out: Path | None = None) -> list[Path]:
    """The text files of a folder, hidden ones and those in `leave_out` left out; or the file itself."""
    accepted = ", ".join(SUFFIXES)
    if not root.exists():
        raise CorpusError(f"{root} does not exist; expected a file or folder of {accepted} (or .gz of these)")
    if root.is_file():
        if not _is_text(root):
            raise CorpusError(f"{root}: expected a file ending in {accepted} (or .gz of these)")
        return [root]
    files = sorted(p for p in root.rglob("*") if p.is_file() and _is_text(p) and not _is_hidden(p.relative_to(root)))
    if leave_out is not None:
        files = [p for p in files if not p.resolve().is_relative_to(leave_out.resolve())]
    if not files:
        raise CorpusError(f"{root} holds no file ending in {accepted} (or .gz of these); point corpus.source at text")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_text(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(SUFFIXES)


def _read_text(path: Path, encoding: str) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise CorpusError(f"{path} is not a whole gzip file ({error}); make it again or take it out") from error
    try:
        return data.decode(encoding).removeprefix("\ufeff").replace("\r\n", "\n")
    except LookupError as error:
        raise CorpusError(f"corpus.encoding: {error}; expected a name Python knows, such as utf-8") from error


def _json_lines(name: str, text: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            body = record["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f'{name}:{number}: expected a JSON object with a "text" field, got {line[:40]!r}'
            ) from error
        if not isinstance(body, str):
            raise CorpusError(f'{name}:{number}: expected "text" to be a string, got {type(body).__name__}')
        if not body.isascii() and any("\ud800" <= c <= "\udfff" for c in body):
            raise CorpusError(f"{name}:{number}: the text holds half of a surrogate pair; write it as whole characters")
        title = next((str(record[key]) for key in ("name", "title", "id") if record.get(key) is not None), str(number))
        yield Document(f"{name}:{title}", body)


def _python_documents() -> Iterator[Document]:
    """The docstrings of each standard-library module, and each topic of the language reference.

    Modules are parsed, not imported: importing them all would run them all.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if NOT_LIBRARY.isdisjoint(parts) and parts[0] != "pydoc_data":
            text = "\n\n\n".join(_docstrings(file))
            if text:
                yield Document(".".join(parts).removesuffix(".py").removesuffix(".__init__"), text)
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None:
        return
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"topics/{name}", inspect.cleandoc(topics[name]))


def _docstrings(file: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if not text:
                continue
            yield text if isinstance(node, ast.Module) else f"{node.name}\n\n{text}"


def check_text(text: str, what: str) -> None:
    """Refuse text that cannot be written as UTF-8, and say where."""
    if text.isascii():
        return
    place = next((at for at, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
    if place is not None:
        raise CorpusError(f"{what} holds half of a surrogate pair at character {place}; write it as whole characters")
