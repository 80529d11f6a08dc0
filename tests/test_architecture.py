"""Imports point backwards along the flow, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "gnnlm"
FLOW = ["corpus", "lm", "datastore", "retrieval", "graph", "gnn", "predict", "train", "evaluate"]
ONLY_IN = {
    "faiss": ["retrieval", "datastore"],  # search, and learning the codec
    "transformers": ["lm"],
    "accelerate": ["train"],
    "matplotlib": ["evaluate"],
    "typer": ["cli"],
}
LEAVES = {"config", "artifact", "errors", "progress"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def test_imports_point_backwards() -> None:
    for number, part in enumerate(FLOW):
        allowed = set(FLOW[: number + 1]) | LEAVES
        for path in (SRC / part).glob("*.py"):
            for name in imports(path):
                if name.startswith("gnnlm."):
                    assert name.split(".")[1] in allowed, f"{path.relative_to(SRC)} imports {name}"


def test_heavy_libraries_stay_in_their_place() -> None:
    for path in SRC.rglob("*.py"):
        place = path.relative_to(SRC).parts[0]
        for name in imports(path):
            homes = ONLY_IN.get(name.split(".")[0])
            assert homes is None or place in homes, f"{path.relative_to(SRC)} imports {name}"


def test_graph_and_gnn_see_tensors_only() -> None:
    for part in ("graph", "gnn"):
        for path in (SRC / part).glob("*.py"):
            assert not imports(path) & {"gnnlm.artifact", "gnnlm.run", "faiss"}, path


def test_importing_is_light() -> None:
    code = "import sys, gnnlm, gnnlm.cli; print([m for m in ('torch', 'transformers', 'faiss') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_files_read_in_one_sitting() -> None:
    long = {p.name: n for p in SRC.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long
