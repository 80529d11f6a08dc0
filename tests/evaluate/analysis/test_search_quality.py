"""The quality of an approximate index, with FAISS's flat index as oracle; an exact one is not searched at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from gnnlm.evaluate.analysis import search_quality
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.index import Rows, as_keys, keys_of
from gnnlm.run import Run
from gnnlm.run.analyze import Analysis
from tests.cli import gnnlm
from tests.evaluate.analysis.copies import copied_run


def test_an_exact_index_is_not_searched(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ExactIndex, "search", never)
    found = search_quality.measure(Analysis(tiny_run).subject)
    assert [row.recall for row in found.recall] == [1.0, 1.0, 1.0]
    assert found.queries == 0
    section = search_quality.show(found)
    assert "exact" in section.sentences[0]
    assert not section.figures


@pytest.fixture(scope="module")
def rough(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose index looks into one cluster, and that has no network."""
    folder = tmp_path_factory.mktemp("rough")
    return copied_run(tiny_run, folder, index={"kind": "ivf", "clusters": 20, "probes": 1}, gnn={"layers": 0})


def test_recall_and_cost_of_a_rough_index(rough: Run) -> None:
    found = json.loads(gnnlm("analyze", rough.root, "--part", "search", "--json").stdout.splitlines()[-1])["search"]
    encoded, test = rough.artifact("encode"), rough.snapshot.searched("test")
    tokens = np.flatnonzero(np.asarray(rough.snapshot.streams["test"].tokens) >= 0)
    rows = Rows.of(rough.snapshot.streams["train"]).all().numpy()
    flat = faiss.IndexFlatIP(encoded.facts["width"])
    flat.add(as_keys(torch.from_numpy(np.array(keys_of(encoded, "train")))[rows], "cosine").numpy())
    asked = as_keys(torch.from_numpy(np.array(encoded.array("test.states.npy")))[tokens], "cosine").numpy()
    true = rows[flat.search(asked, test.table.k)[1]]
    near = np.asarray(test.table.ids)[tokens]
    assert found["queries"] == len(tokens) <= search_quality.QUERIES
    for row in found["recall"]:
        k = row["k"]
        wanted = np.mean([len({*a[:k].tolist()} & {*b[:k].tolist()}) / k for a, b in zip(true, near, strict=True)])
        assert row["recall"] == pytest.approx(wanted, abs=0.02)  # which of equal rows are found differs
    assert 0.1 < found["recall"][-1]["recall"] < 0.99
    (cost,) = found["cost"]
    assert cost["name"] == "knn"
    assert cost["ppl"] == pytest.approx(_report(rough.root)["rows"]["knn"]["ppl"], rel=1e-6)
    assert cost["change"] == pytest.approx(cost["ppl"] / cost["exact_ppl"] - 1)
    assert (rough.root / "analysis" / "search" / "search_recall.png").exists()


def test_without_a_network(rough: Run) -> None:
    """Parts that need a network say so, prepare nothing, and the others are made."""
    parts = [flag for name in ("representation", "complexity", "growth", "search") for flag in ("--part", name)]
    done = gnnlm("analyze", rough.root, *parts, "--json")
    assert done.stdout.count("needs a graph network") == 2
    assert not (rough.root / "analysis" / "gnn-store").exists()
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"representation", "complexity"}.isdisjoint(found)
    assert list(found["growth"]["sizes"][0]["predictors"]) == ["base", "knn"]
    assert found["growth"]["history"] == []
    whole, (cost,) = found["growth"]["sizes"][-1]["predictors"]["knn"], found["search"]["cost"]
    assert whole["ppl"] == pytest.approx(cost["exact_ppl"])  # growth searches exactly, whatever the run's index


def _report(root: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((root / "report" / "report.json").read_text())
    return report
