"""Tuning against a plain loop; the figures of a report against their definitions."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from gnnlm.evaluate.report import Report, ScoredTest, bootstrap_interval, read_report
from gnnlm.evaluate.tables import cells, markdown
from gnnlm.evaluate.tune import Grid, tune_mixes
from gnnlm.predict.knn import Evidence, Mix, knn_target_log_probs, mix_log_probs
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.run import Run


def valid_tokens(run: Run) -> tuple[Any, ...]:
    """The searched valid split, its targets, their base log-probabilities, and their neighbours' tokens."""
    text, store = run.parts.searched("valid"), run.parts.store
    lines = torch.nonzero(text.text.tokens_P >= 0)[:, 0]
    targets, found = text.text.tokens(lines), text.table.at(lines)
    base = run.parts.head.target_log_probs(text.text.states(lines), targets).double()
    return text, store, targets, base, store.tokens(found.positions.clamp(min=0)), found.similarity


def test_tuning_tries_every_combination(tiny_run: Run) -> None:
    text, store, targets, base, tokens, similarity = valid_tokens(tiny_run)
    ks, temperatures, lambdas = (2, 8), (0.01, 0.5), (0.0, 0.2, 1.0)
    chosen, table = tune_mixes(text, store, {"base": base.numpy()}, Grid(ks, temperatures, lambdas), chunk=100)
    losses = {}
    for i, temperature in enumerate(temperatures):
        for j, k in enumerate(ks):
            knn = knn_target_log_probs(tokens, similarity.double(), targets, k, temperature)
            for m, weight in enumerate(lambdas):
                loss = -mix_log_probs(base, knn, weight).clamp(min=math.log(1e-300)).mean().item()
                losses[k, temperature, weight] = loss
                assert table["losses"]["base"][i][j][m] == pytest.approx(loss, rel=1e-9)
    best = min(losses, key=lambda key: losses[key])
    assert (chosen["base"].k, chosen["base"].temperature, chosen["base"].weight) == best


def test_tuning_by_similarity(tiny_run: Run) -> None:
    """Each bucket has the weight that is best for it, so the whole is at least as good as one weight for all."""
    text, store, targets, base, tokens, similarity = valid_tokens(tiny_run)
    lambdas = (0.0, 0.1, 0.3, 0.6)
    chosen, table = tune_mixes(text, store, {"base": base.numpy()}, Grid((8,), (0.1,), lambdas, 4), chunk=100)
    mix = chosen["base"]
    assert len(mix.weights) == len(mix.edges) + 1 == 4
    knn = knn_target_log_probs(tokens, similarity.double(), targets, 8, 0.1)
    evidence = Evidence(similarity[:, 0], torch.ones(len(similarity)))
    weight = mix.weight_of(evidence)
    bucket = torch.bucketize(similarity[:, 0].contiguous(), torch.tensor(mix.edges), right=True)
    for number in range(4):
        mine = bucket == number
        assert 0.15 < mine.float().mean() < 0.35
        each = [-mix_log_probs(base[mine], knn[mine], lam).mean().item() for lam in lambdas]
        torch.testing.assert_close(weight[mine], torch.full_like(weight[mine], lambdas[int(np.argmin(each))]))
    loss = -mix_log_probs(base, knn, weight).mean().item()
    assert loss <= min(table["losses"]["base"][0][0]) + 1e-9
    assert Mix.of(json.loads(json.dumps(mix.as_dict()))).weight_of(evidence).equal(weight)
    many, _ = tune_mixes(text, store, {"base": base.numpy()}, Grid((8,), (0.1,), lambdas, 100))
    assert len(many["base"].weights) == len(targets) // 200


def test_report_figures() -> None:
    scores = {name: np.log(np.array([0.5, 0.25, 0.125, 0.5])) for name in PREDICTORS}
    scores["gnn"] = np.log(np.array([0.5, 0.5, 0.0625, 0.5]))
    test = ScoredTest(scores, np.array([0, 0, 1, 1]), ["a", "b"], 2, 8, dict.fromkeys(PREDICTORS, 10.0))
    rows = test.rows(200, 0)
    base, gnn = rows["base"], rows["gnn"]
    assert base.ppl == pytest.approx(2 ** (7 / 4))
    assert base.ppl_word == pytest.approx(2 ** (7 / 2))
    assert base.bits_per_byte == pytest.approx(7 / 8)
    assert (gnn.helped, gnn.hurt) == (0.25, 0.25)
    assert base.change == 0
    first, second = test.documents()
    assert (first.name, first.tokens, second.name, second.tokens) == ("a", 2, "b", 2)
    assert first.ppl["base"] == pytest.approx(2**1.5)
    assert second.ppl["gnn"] == pytest.approx(2**2.5)
    low, high = base.ppl_95
    assert low == pytest.approx(2**1.5)
    assert high == pytest.approx(2**2)


def test_an_impossible_token_gives_null_not_nan(tiny_run: Run) -> None:
    scores = {name: np.log(np.array([0.5, 0.5, 0.5])) for name in PREDICTORS}
    scores["knn"] = np.array([-0.5, -math.inf, -0.5])
    test = ScoredTest(scores, np.array([0, 1, 1]), ["a", "b"], 2, 8, dict.fromkeys(PREDICTORS, 10.0))
    whole = read_report(tiny_run.artifact("eval"))
    report = whole.model_copy(update={"rows": test.rows(50, 0), "documents": test.documents()})
    assert report.rows["knn"].ppl is None
    assert report.documents[1].ppl["knn"] is None
    json.dumps(report.as_json(), allow_nan=False)
    assert cells(report)[1][1] == "inf"
    assert Report.model_validate(json.loads(json.dumps(report.as_json()))) == report


def test_interval_narrows_with_documents() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(-2, 1, size=4000)
    few = bootstrap_interval(scores, np.repeat(np.arange(10), 400), 500, 0)
    one = bootstrap_interval(scores, np.zeros(4000, dtype=np.int64), 50, 0)
    assert few[0] < math.exp(-scores.mean()) < few[1]
    assert one[0] == pytest.approx(one[1])


def test_markdown_has_the_four_rows(tiny_run: Run) -> None:
    text = markdown(read_report(tiny_run.artifact("eval")))
    for label in ("| base |", "| +kNN |", "| +GNN |", "| +GNN+kNN |"):
        assert label in text
    assert (tiny_run.artifact("eval").path / "rows.png").read_bytes().startswith(b"\x89PNG")
