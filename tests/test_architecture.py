"""Imports point backwards along the flow, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "gnnlm"
LEAVES = {"config", "artifact", "engine", "errors", "layout", "matmul", "progress", "stage"}
EDGES: dict[str, set[str]] = {  # what each package imports of the others; the leaves may be imported everywhere
    "corpus": set(),
    "lm": {"corpus"},
    "datastore": {"corpus", "lm"},
    "retrieval": {"corpus", "datastore"},
    "graph": set(),
    "gnn": {"graph"},
    "predict": {"corpus", "datastore", "gnn", "graph", "lm", "retrieval"},
    "train": {"corpus", "datastore", "gnn", "graph", "lm", "predict", "retrieval"},
    "evaluate": {"corpus", "datastore", "gnn", "lm", "predict", "retrieval"},
    "write": {"datastore", "lm", "predict", "retrieval"},
    "serve": {
        "answers",
        "book",
        "corpus",
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
    "plan": {"corpus", "datastore", "evaluate", "gnn", "graph", "lm", "predict", "retrieval", "train"},
    "run": {
        "corpus",
        "datastore",
        "evaluate",
        "generation",
        "gnn",
        "lm",
        "plan",
        "predict",
        "retrieval",
        "train",
    },
    "library": {"corpus", "datastore", "generation", "predict", "retrieval", "run", "train"},
    "answers": {"datastore", "predict"},
    "book": {"answers", "corpus", "datastore", "explain", "predict", "retrieval", "run", "write"},
    "explain": {"answers", "gnn", "predict", "retrieval"},
    "__main__": {"cli"},
    "gnnlm": set(),
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


def modules() -> dict[str, Path]:
    """Every module by its dotted name; a package is its `__init__`."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = ("gnnlm", *path.relative_to(SRC).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def at_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """Every node of a tree but those that only type checkers see."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from at_runtime(child)


def imports(path: Path) -> set[str]:
    """Every module that a file imports when it runs, inside functions too."""
    found = set()
    for node in at_runtime(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else module for name in names}
    return found


GRAPH = {name: (imports(path) & MODULES.keys()) - {name} for name, path in MODULES.items()}


def package_of(module: str) -> str:
    """The package of a module, or the module itself if it stands beside the packages."""
    return module.split(".")[1] if module != "gnnlm" else "gnnlm"


def edges(package: str) -> set[str]:
    """The packages of ours that a package really imports, itself, the leaves and the version left out."""
    found = {package_of(name) for module in MODULES if package_of(module) == package for name in GRAPH[module]}
    return found - LEAVES - {package, "gnnlm"}


def cycles(graph: Mapping[str, Set[str]]) -> set[str]:
    """The nodes from which a path leads back to them."""
    found = set()
    for start in graph:
        reached: set[str] = set()
        ahead = [*graph[start]]
        while ahead:
            node = ahead.pop()
            if node not in reached:
                reached.add(node)
                ahead += graph[node]
        if start in reached:
            found.add(start)
    return found


def test_the_edges_are_those_written_here() -> None:
    """Both ways: no edge is missing above, and none is there that no file needs."""
    assert {package: edges(package) for package in EDGES} == EDGES


def test_leaves_import_nothing_but_leaves() -> None:
    assert {leaf: edges(leaf) for leaf in LEAVES} == {leaf: set() for leaf in LEAVES}


def test_no_module_is_imported_by_what_it_imports() -> None:
    """The root is left out: all of the library may ask for its version, and it imports nothing before it is used."""
    inside = {module: imported - {"gnnlm"} for module, imported in GRAPH.items() if module != "gnnlm"}
    found = cycles(inside)
    assert not found


def test_no_package_is_imported_by_what_it_imports() -> None:
    assert cycles({package: edges(package) & EDGES.keys() for package in EDGES}) == set()


def test_class_names_are_unique() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(SRC)))
    twins = {name: places for name, places in found.items() if len(places) > 1}
    assert twins == {}


def test_file_names_are_unique() -> None:
    names = Counter(path.name for path in MODULES.values())
    assert {name for name, count in names.items() if count > 1} <= {"__init__.py", "__main__.py"}


def test_artifacts_know_no_run_and_no_command() -> None:
    for path in (SRC / "artifact").rglob("*.py"):
        assert "gnnlm.layout" not in imports(path), path
        assert not re.search(r"gnnlm (run|refit|renew|history)|--rebuild|tune|refitted", path.read_text()), path


def test_every_package_is_looked_at() -> None:
    assert {package_of(module) for module in MODULES} == EDGES.keys() | LEAVES | {"cli"}


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
