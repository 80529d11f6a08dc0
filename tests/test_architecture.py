"""Imports point backwards along the flow, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "gnnlm"
LEAVES = {"config", "artifact", "engine", "errors", "matmul", "progress"}
EDGES: dict[str, set[str]] = {  # what each package imports of the others; the leaves may be imported everywhere
    "corpus": set(),
    "lm": {"corpus"},
    "datastore": {"corpus", "lm"},
    "retrieval": {"corpus", "datastore"},
    "graph": set(),
    "gnn": {"graph"},
    "predict": {"corpus", "datastore", "gnn", "graph", "lm", "retrieval"},
    "train": {"corpus", "datastore", "gnn", "graph", "lm", "predict"},
    "evaluate": {"corpus", "datastore", "gnn", "lm", "predict", "retrieval"},
    "write": {"datastore", "lm", "predict", "retrieval"},
    "serve": {
        "answers",
        "book",
        "corpus",
        "datastore",
        "evaluate",
        "library",
        "lm",
        "predict",
        "retrieval",
        "run",
        "write",
    },
    "integrations": {"book", "datastore", "lm", "predict", "retrieval", "run", "write"},
    "generation": set(),
    "run": {"corpus", "datastore", "evaluate", "generation", "gnn", "graph", "lm", "predict", "retrieval", "train"},
    "library": {"corpus", "datastore", "generation", "predict", "retrieval", "run", "train"},
}
ONLY_IN = {
    "faiss": {"retrieval", "datastore"},  # search, and learning the codec
    "bm25s": {"retrieval"},
    "transformers": {"lm", "integrations"},
    "lm_eval": {"integrations"},
    "ray": {"engine"},
    "fsspec": {"engine"},
    "matplotlib": {"evaluate"},
    "typer": {"cli"},
    "fastapi": {"serve"},
    "prometheus_client": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def edges(package: str) -> set[str]:
    """The packages of ours that a package really imports, itself and the leaves left out."""
    found = {name.split(".")[1] for path in (SRC / package).rglob("*.py") for name in imports(path) if _ours(name)}
    return found - LEAVES - {package}


def _ours(name: str) -> bool:
    return name.startswith("gnnlm.")


def test_the_edges_are_those_written_here() -> None:
    """Both ways: no edge is missing above, and none is there that no file needs."""
    assert {package: edges(package) for package in EDGES} == EDGES


def test_leaves_import_nothing_but_leaves() -> None:
    for leaf in LEAVES:
        files = (SRC / leaf).rglob("*.py") if (SRC / leaf).is_dir() else [SRC / f"{leaf}.py"]
        for path in files:
            assert {name.split(".")[1] for name in imports(path) if _ours(name)} <= LEAVES, path


def test_every_package_is_looked_at() -> None:
    packages = {path.parent.name for path in SRC.glob("*/__init__.py")}
    assert packages == EDGES.keys() | {"cli"} | {leaf for leaf in LEAVES if (SRC / leaf).is_dir()}


def test_heavy_libraries_stay_in_their_place() -> None:
    homes: dict[str, set[str]] = {library: set() for library in ONLY_IN}
    for path in SRC.rglob("*.py"):
        for name in imports(path) & set(ONLY_IN) | {n.split(".")[0] for n in imports(path)} & set(ONLY_IN):
            homes[name].add(path.relative_to(SRC).parts[0])
    assert homes == ONLY_IN


def test_importing_is_light() -> None:
    heavy = ("torch", "transformers", "faiss", "fastapi")
    code = f"import sys, gnnlm, gnnlm.cli.commands; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_files_read_in_one_sitting() -> None:
    long = {p.name: n for p in SRC.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long
