"""The documentation of the running Python as documents."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__"}
REPEATED = {"encodings"}  # some 80 modules of one sentence each, the same but for a name: retrieval would only copy it


def python_texts() -> Iterator[tuple[str, str]]:
    """Yield name and text of the docstrings of each standard module, and of each topic of the language reference.

    Modules are parsed, not imported: importing them all would run them all.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if (NOT_LIBRARY | REPEATED).isdisjoint(parts) and parts[0] != "pydoc_data":
            text = "\n\n\n".join(_docstrings(file))
            if text:
                yield ".".join(parts).removesuffix(".py").removesuffix(".__init__"), text
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None:
        return
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", inspect.cleandoc(topics[name])


def _docstrings(file: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").encode("utf-8", "replace").decode()  # half surrogate pairs are text
            if not text:
                continue
            yield text if isinstance(node, ast.Module) else f"{node.name}\n\n{text}"
