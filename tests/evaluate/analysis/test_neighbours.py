"""Number of neighbours: what the run's own k gives is the report's, and other values are those of a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gnnlm.run import Run
from tests.evaluate.analysis.analysed import analysis_of, results_of, scored_of


def test_the_runs_own_k_gives_the_reports_rows(tiny_run: Run) -> None:
    found, report = results_of(tiny_run, "neighbours")["neighbours"], analysis_of(tiny_run.root).subject.report
    assert [row["k"] for row in found["graph_k"]] == sorted({row["k"] for row in found["graph_k"]})
    assert {"k", "ppl", "memory_mb", "tokens_per_s"} <= found["graph_k"][0].keys()
    for row in found["graph_k"]:
        if row["k"] == found["chosen"]["graph_k"]:
            assert row["ppl"] == pytest.approx(report.rows["gnn"].ppl, rel=1e-4)
            assert row["gnn_knn"]["ppl"] == pytest.approx(report.rows["gnn_knn"].ppl, rel=1e-4)
            break
    else:
        pytest.fail("the run's own k is not among those tried")
    for name in ("knn", "gnn_knn"):
        same = [row[name] for row in found["knn_k"] if row["k"] == found["chosen"][name]]
        assert [row["ppl"] for row in same] == [pytest.approx(report.rows[name].ppl, rel=1e-4)]


def test_one_neighbour_by_a_loop(tiny_run: Run) -> None:
    """k = 1: all of p_kNN is on the nearest row's token."""
    results_of(tiny_run, "neighbours")
    subject, scored = analysis_of(tiny_run.root).subject, scored_of(tiny_run)
    mix = replace(subject.snapshot.predictor.mixes["base"], k=1)
    found = scored.mixed(subject.test, subject.snapshot.store, "base", mix)
    near = subject.test.table.at(subject.positions_N, 1)
    tokens = subject.snapshot.store.tokens(near.positions[:, 0]).tolist()
    base = subject.scores["base"]
    ratios = np.exp(found - base)
    right = [n for n, target in enumerate(subject.targets_N.tolist()) if tokens[n] == target]
    wrong = sorted(set(range(len(base))) - set(right))
    assert right
    assert wrong
    assert (ratios[wrong] <= 1 + 1e-6).all()  # a vote for another token can only take from this one
    for n in right:  # p = lambda + (1 - lambda) p_base, so it lies between the two
        assert base[n] - 1e-6 <= found[n] <= 1e-6
    assert math.isfinite(found.sum())
