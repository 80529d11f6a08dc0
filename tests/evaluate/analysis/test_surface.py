"""The tuning surface: its figures against loops, its ranks against scipy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.evaluate.analysis.tuning_surface import SurfaceResult, compare_surfaces, rank_correlation, ranks_of, show
from gnnlm.run import Run
from tests.evaluate.analysis.analysed import analysis_of, results_of
from tests.reference.knn import knn_distribution

PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=30)


def test_ranks_by_hand() -> None:
    assert ranks_of(np.array([5.0, 1.0, 5.0, 5.0, 0.0])).tolist() == [4, 2, 4, 4, 1]
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([0.0, 5.0, 99.0])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)
    assert rank_correlation(np.ones(3), np.array([3.0, 2.0, 1.0])) == 0


@given(PAIRS)
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_surfaces_compared_by_hand() -> None:
    valid = np.log([[[10.0, 9.0], [8.0, 12.0]]])  # valid's best is the third, which test has second
    test = np.log([[[11.0, 9.0], [9.9, 13.0]]])
    found = compare_surfaces(valid, test)
    assert found.better == 0.25
    assert found.cost == pytest.approx(0.1)
    assert found.ranks == pytest.approx(0.8)  # ranks 3 2 1 4 and 3 1 2 4: 1 - 6 * 2 / (4 * 15)
    assert found.ranks_best == pytest.approx(-1)  # of the two best, the order is turned
    same = compare_surfaces(valid, valid)
    assert (same.better, same.cost) == (0, 0)
    assert same.ranks == pytest.approx(1)


def test_the_figures_are_those_of_valid_and_of_test(tiny_run: Run) -> None:
    found = results_of(tiny_run, "surface")["surface"]
    subject = analysis_of(tiny_run.root).subject
    table = json.loads(tiny_run.artifact("tune").text("tuning.json"))
    for name, state in (("knn", "base"), ("gnn_knn", "gnn")):
        one = found["predictors"][name]
        chosen, losses = one["valid"]["chosen"], np.array(table["losses"][state])
        t, k = table["temperatures"].index(chosen["temperature"]), table["ks"].index(chosen["k"])
        assert one["valid"]["ppl"] == pytest.approx(math.exp(losses.min())) == pytest.approx(one["valid"]["best_ppl"])
        assert one["valid"]["temperature_lambda"] == pytest.approx(np.exp(losses[:, k]))
        assert one["valid"]["k_lambda"] == pytest.approx(np.exp(losses[t]))
        assert one["test"]["without_knn"] == pytest.approx(math.exp(-subject.scores[state].mean()), rel=1e-5)
        assert (
            one["test"]["best_ppl"] <= one["test"]["ppl"] == pytest.approx((1 + one["cost"]) * one["test"]["best_ppl"])
        )
        used = [row for row in one["weights"] if row["used"]]
        assert len(used) == 1
        assert used[0]["ppl"] == pytest.approx(subject.report.rows[name].ppl, rel=1e-4)
        assert one["weights"][0]["against_one"]["change"] == 0
        assert one["weights"][0]["ppl"] == pytest.approx(one["test"]["ppl"], rel=1e-6)


def test_a_point_of_the_test_surface_by_a_loop(tiny_run: Run) -> None:
    found = results_of(tiny_run, "surface")["surface"]
    subject = analysis_of(tiny_run.root).subject
    chosen = found["predictors"]["knn"]["valid"]["chosen"]
    t, weight = 2, found["lambdas"].index(0.1)
    near, total = subject.test.table.at(subject.positions_N), 0.0
    rows = zip(
        near.positions, near.similarity.tolist(), subject.targets_N.tolist(), subject.scores["base"], strict=True
    )
    for positions, similarity, target, log_p in rows:
        knn = knn_distribution(
            subject.snapshot.store.tokens(positions).tolist(), similarity, chosen["k"], found["temperatures"][t]
        )
        assert knn is not None
        total -= math.log(0.1 * knn.get(target, 0.0) + 0.9 * math.exp(log_p))
    ppl = found["predictors"]["knn"]["test"]["temperature_lambda"][t][weight]
    assert ppl == pytest.approx(math.exp(total / len(near.positions)), rel=1e-4)


def test_shown(tiny_run: Run) -> None:
    found = results_of(tiny_run, "surface")["surface"]
    section = show(SurfaceResult.model_validate(found))
    assert [figure.name for figure in section.figures] == ["surface_knn", "surface_gnn_knn"]
    cost = found["predictors"]["gnn_knn"]["cost"]
    assert f"{100 * cost:.2f}% above test's own best" in section.summary[0]
    assert "gate" in section.sentences[2]
    flat = json.loads(json.dumps(found))
    for one in flat["predictors"].values():  # kNN of no use at all: the figure has to stand that
        for split in ("valid", "test"):
            one[split] |= {"without_knn": 1.0, "chosen": {**one[split]["chosen"], "weight": 0.0}}
    assert len(show(SurfaceResult.model_validate(flat)).figures) == 2
