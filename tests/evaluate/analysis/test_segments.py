"""The analysis of a run whose store has several segments: what it says of one with a single segment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gnnlm.run import Run
from tests.cli import gnnlm
from tests.evaluate.analysis.copies import copied_run

CHANGES: dict[str, Any] = {
    "index": {"kind": "ivf", "clusters": 20, "probes": 2},
    "codec": {"kind": "pq", "bytes": 8, "train_rows": 2000},
}
PARTS = ("representation", "search", "growth", "complexity", "where", "neighbours", "recall")


def analysed(run: Run) -> dict[str, Any]:
    flags = [flag for name in PARTS for flag in ("--part", name)]
    found: dict[str, Any] = json.loads(gnnlm("analyze", run.root, *flags, "--json").stdout.splitlines()[-1])
    return found


def test_several_segments_are_analysed_as_one(tiny_run: Run, tmp_path: Path) -> None:
    """Coded states and an approximate index; a network that does not learn keeps the two runs alike."""
    still = {"train": {"lr": 1e-30, "weight_decay": 0.0}}
    several = copied_run(tiny_run, tmp_path / "several", **CHANGES, **still, store={"segment_tokens": 1200})
    one = copied_run(tiny_run, tmp_path / "one", **CHANGES, **still)
    assert [len(run.snapshot.streams["train"].segments) for run in (several, one)] == [4, 1]
    found, want = analysed(several), analysed(one)
    assert set(found) >= set(PARTS)
    for pair in ("base/base", "base/gnn", "gnn/base", "gnn/gnn"):
        assert found["representation"][pair]["ppl"] == pytest.approx(want["representation"][pair]["ppl"], rel=0.01)
    for here, there in zip(found["search"]["recall"], want["search"]["recall"], strict=True):
        assert here["recall"] == pytest.approx(there["recall"], abs=0.05)
    assert found["search"]["rows"] == want["search"]["rows"]
    for here, there in zip(found["growth"]["sizes"], want["growth"]["sizes"], strict=True):
        assert here["tokens"] == there["tokens"]
        assert here["predictors"]["knn"]["ppl"] == pytest.approx(there["predictors"]["knn"]["ppl"], rel=0.01)
    sizes, whole = (result["complexity"]["stored_bytes"] for result in (found, want))
    assert sizes["encode"] == pytest.approx(whole["encode"], rel=0.01)
    assert sizes["codec"] == pytest.approx(whole["codec"], rel=0.05)
