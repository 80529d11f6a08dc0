"""Tuning against a plain loop; the figures of a report against their definitions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnlm.artifact import Draft, write_json
from gnnlm.errors import ArtifactError
from gnnlm.evaluate.change import change_words
from gnnlm.evaluate.report import Report, ReportScores, read_report
from gnnlm.evaluate.report_tables import markdown, notes, report_table
from gnnlm.evaluate.tune import Grid, tune_mixes
from gnnlm.predict import bootstrap
from gnnlm.predict.bootstrap import bootstrap_interval
from gnnlm.predict.knn import Evidence, Mix, knn_target_log_probs, mix_log_probs, neighbour_weights
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.run import Run


def valid_tokens(run: Run) -> tuple[Any, ...]:
    """The searched valid split, its targets, their base log-probabilities, and their neighbours' tokens."""
    text, store = run.snapshot.searched("valid"), run.snapshot.store
    lines = text.text.token_positions()
    targets, found = text.text.tokens(lines), text.table.at(lines)
    base = run.snapshot.head.target_log_probs(text.text.states(lines), targets).double()
    return text, store, targets, base, store.tokens(found.positions.clamp(min=0)), found.similarity


def test_tuning_tries_every_combination(tiny_run: Run) -> None:
    text, store, targets, base, tokens, similarity = valid_tokens(tiny_run)
    ks, temperatures, lambdas = (2, 8), (0.01, 0.5), (0.0, 0.2, 1.0)
    chosen, table = tune_mixes(text, store, {"base": base.numpy()}, Grid(ks, temperatures, lambdas), chunk=100)
    losses = {}
    for i, temperature in enumerate(temperatures):
        for j, k in enumerate(ks):
            knn = knn_target_log_probs(tokens, neighbour_weights(similarity[:, :k].double(), temperature), targets)
            for m, weight in enumerate(lambdas):
                loss = -mix_log_probs(base, knn, weight).clamp(min=math.log(1e-300)).mean().item()
                losses[k, temperature, weight] = loss
                assert table.losses["base"][i][j][m] == pytest.approx(loss, rel=1e-9)
    best = min(losses, key=lambda key: losses[key])
    assert (chosen["base"].k, chosen["base"].temperature, chosen["base"].weight) == best


def test_tuning_by_similarity(tiny_run: Run) -> None:
    """Each bucket has the weight that is best for it, so the whole is at least as good as one weight for all."""
    text, store, targets, base, tokens, similarity = valid_tokens(tiny_run)
    lambdas = (0.0, 0.1, 0.3, 0.6)
    chosen, table = tune_mixes(text, store, {"base": base.numpy()}, Grid((8,), (0.1,), lambdas, 4), chunk=100)
    mix = chosen["base"]
    assert len(mix.weights) == len(mix.edges) + 1 == 4
    knn = knn_target_log_probs(tokens, neighbour_weights(similarity[:, :8].double(), 0.1), targets)
    evidence = Evidence(similarity[:, 0], torch.ones(len(similarity)))
    weight = mix.weight_of(evidence)
    bucket = torch.bucketize(similarity[:, 0].contiguous(), torch.tensor(mix.edges), right=True)
    for number in range(4):
        mine = bucket == number
        assert 0.15 < mine.float().mean() < 0.35
        each = [-mix_log_probs(base[mine], knn[mine], lam).mean().item() for lam in lambdas]
        torch.testing.assert_close(weight[mine], torch.full_like(weight[mine], lambdas[int(np.argmin(each))]))
    loss = -mix_log_probs(base, knn, weight).mean().item()
    assert loss <= min(table.losses["base"][0][0]) + 1e-9
    assert Mix.of(json.loads(json.dumps(mix.as_dict()))).weight_of(evidence).equal(weight)
    many, _ = tune_mixes(text, store, {"base": base.numpy()}, Grid((8,), (0.1,), lambdas, 100))
    assert len(many["base"].weights) == len(targets) // 200


def test_report_figures() -> None:
    scores = {name: np.log(np.array([0.5, 0.25, 0.125, 0.5])) for name in PREDICTORS}
    scores["gnn"] = np.log(np.array([0.5, 0.5, 0.0625, 0.5]))
    test = ReportScores(scores, np.array([0, 0, 1, 1]), ["a", "b"], 2, 8, dict.fromkeys(PREDICTORS, 10.0))
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
    test = ReportScores(scores, np.array([0, 1, 1]), ["a", "b"], 2, 8, dict.fromkeys(PREDICTORS, 10.0))
    whole = read_report(tiny_run.artifact("eval"))
    report = whole.model_copy(update={"rows": test.rows(50, 0), "documents": test.documents()})
    assert report.rows["knn"].ppl is None
    assert report.documents[1].ppl["knn"] is None
    json.dumps(report.as_json(), allow_nan=False)
    assert report_table(report).cells()[1][1] == "inf"
    assert Report.model_validate(json.loads(json.dumps(report.as_json()))) == report


def test_interval_narrows_with_documents() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(-2, 1, size=4000)
    few = bootstrap_interval(scores, np.repeat(np.arange(10), 400), 500, 0)
    one = bootstrap_interval(scores, np.zeros(4000, dtype=np.int64), 50, 0)
    assert few[0] < math.exp(-scores.mean()) < few[1]
    assert one[0] == pytest.approx(one[1])


def test_a_change_is_resampled_in_pairs() -> None:
    """Two documents: a resample holds the first twice, each once, or the second twice; all rows see the same."""
    scores = {name: np.log(np.array([0.5, 0.5, 0.01, 0.02])) for name in PREDICTORS}
    scores["gnn"] = scores["base"] + np.log([1.25, 1.25, 2.0, 2.0])
    test = ReportScores(scores, np.array([0, 0, 1, 1]), ["a", "b"], 2, 8, dict.fromkeys(PREDICTORS, 10.0))
    rows = test.rows(200, 0)
    gnn = rows["gnn"]
    assert gnn.change == pytest.approx(1 / math.sqrt(1.25 * 2.0) - 1)
    assert (gnn.change_low, gnn.change_high) == pytest.approx((1 / 2.0 - 1, 1 / 1.25 - 1))
    assert gnn.ppl_95[0] < rows["base"].ppl < gnn.ppl_95[1]  # type: ignore[operator]
    assert (rows["base"].change_low, rows["knn"].change_low, rows["knn"].change_high) == (0, 0, 0)
    one = ReportScores(scores, np.zeros(4, dtype=np.int64), ["a"], 2, 8, dict.fromkeys(PREDICTORS, 10.0)).rows(50, 0)
    assert (one["gnn"].change_low, one["gnn"].change_high) == (None, None)
    assert change_words(one["gnn"].change, None, None) == "-36.8%"


def test_chunks_of_resamples_are_the_same_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, document = np.random.default_rng(0).normal(size=60), np.repeat(np.arange(6), 10)
    whole = bootstrap.bootstrap_means(scores, document, 100, 3)
    monkeypatch.setattr(bootstrap, "CHUNK_DRAWS", 40)
    np.testing.assert_array_equal(bootstrap.bootstrap_means(scores, document, 100, 3), whole)


def test_beginnings_and_the_rest(tiny_run: Run) -> None:
    document = np.repeat([0, 1], [100, 30])
    base = np.full(130, -2.0)
    gain = np.concatenate([np.full(64, 0.5), np.full(36, 0.1), np.full(30, 0.5)])
    scores = {"base": base, "gnn": base + gain}
    test = ReportScores(scores, document, ["a", "b"], 2, 8, dict.fromkeys(scores, 10.0))
    rows = test.rows(50, 0)
    assert rows["gnn"].early_gain == pytest.approx(94 * 0.5)
    assert rows["gnn"].late_gain == pytest.approx(3.6)
    assert (rows["gnn"].ppl_early, rows["gnn"].ppl_late) == pytest.approx((math.exp(1.5), math.exp(1.9)))
    whole = read_report(tiny_run.artifact("eval"))
    changes = {"rows": rows, "documents": test.documents(), "test_tokens": 130}
    said = "\n".join(notes(whole.model_copy(update=changes)))
    assert "93% of the gain of +GNN (in nats) is made in the first 64 tokens of documents, which are 72% of the" in said
    assert "Perplexity there and after: base 7.39 and 7.39, +GNN 4.48 and 6.69." in said


def test_few_documents_are_a_warning(tiny_run: Run) -> None:
    report = read_report(tiny_run.artifact("eval"))
    assert report.split_documents == {"train": 8, "valid": 2, "test": 2}
    assert notes(report)[0].startswith(
        "Warning: fewer than 10 documents in a split (train has 8, valid has 2, test has 2)"
    )
    enough = report.model_copy(update={"split_documents": {"train": 10, "valid": 10, "test": 10}})
    assert "Warning" not in markdown(enough)


def test_a_report_of_another_version_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    values = json.loads(tiny_run.artifact("eval").text("report.json"))
    with Draft(tmp_path / "report", "eval", {}) as draft:
        write_json(draft.file("report.json"), {**values, "version": 2})
        report = draft.finish({})
    with pytest.raises(ArtifactError, match="holds no report of this version; rebuild it"):
        read_report(report)


def test_markdown_has_the_four_rows(tiny_run: Run) -> None:
    text = markdown(read_report(tiny_run.artifact("eval")))
    for label in ("| base |", "| +kNN |", "| +GNN |", "| +GNN+kNN |"):
        assert label in text
    assert (tiny_run.artifact("eval").path / "rows.png").read_bytes().startswith(b"\x89PNG")
