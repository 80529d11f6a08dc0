"""One weight, buckets or a gate: how each is fitted, and that cross-validation takes the right one."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gnnlm as gnnlm_module
from gnnlm.artifact import Draft, read_manifest
from gnnlm.config import load_config
from gnnlm.errors import ArtifactError
from gnnlm.evaluate.mix_weight import FOLDS, Sample, choose_weights, fit_first, fit_weights, folds_of, sample_text
from gnnlm.evaluate.report import WeightRow, read_report
from gnnlm.evaluate.report_tables import markdown
from gnnlm.predict.gate import FEATURES
from gnnlm.predict.knn import Evidence, Mix
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.predict.split_scoring import score_surely
from gnnlm.run import Run

LAMBDAS = tuple(round(0.05 * i, 2) for i in range(20))
GIVEN = Mix(8, 0.1, 0.0)


def sample(helps: Tensor, features: Tensor, read: Tensor | None = None, seed: int = 0) -> Sample:
    """Positions where p_kNN is far better than the model with probability `helps`, and else far worse."""
    count, generator = len(helps), torch.Generator().manual_seed(seed)
    good = torch.rand(count, generator=generator, dtype=torch.float64) < helps
    lm = torch.full((count,), 0.2, dtype=torch.float64).log()
    knn = torch.where(good, 0.9, 0.01).double().log()
    read = torch.arange(1, count + 1) if read is None else read
    return Sample(lm, knn, Evidence(features[:, 0].float(), read, features.double()))


def noise(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, len(FEATURES), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_loss(found: Sample, mix: Mix) -> float:
    return -found.log_probs(mix).mean().item()


# -- folds -----------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=17))
def test_folds_never_share_a_document(sizes: list[int]) -> None:
    document = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    fold = folds_of(document)
    assert set(fold.tolist()) <= set(range(FOLDS))
    if len(sizes) >= FOLDS:
        assert len(fold.unique()) == FOLDS
        assert all(len(fold[document == number].unique()) == 1 for number in range(len(sizes)))
    else:
        assert fold.equal(fold.sort().values)  # contiguous blocks


# -- fitting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_gate_is_no_worse_than_one_weight_where_it_was_fitted(seed: int) -> None:
    features = noise(300, seed)
    found = sample(torch.sigmoid(2 * features[:, 2] - 1), features, seed=seed)
    one = fit_weights("one weight", GIVEN, found, LAMBDAS)
    gate = fit_weights("gate", GIVEN, found, LAMBDAS)
    assert mean_loss(found, gate) < mean_loss(found, one)
    useless = sample(torch.zeros(300), features, seed=seed)  # p_kNN is never any good
    assert mean_loss(useless, fit_weights("gate", GIVEN, useless, LAMBDAS)) < -useless.lm_N.mean().item() + 1e-3


def test_a_gate_finds_the_weights_that_made_the_data() -> None:
    """The likelihood is largest near lambda = P(p_kNN is good), which here is logistic in one feature."""
    features = noise(20000)
    gate = fit_weights("gate", GIVEN, sample(torch.sigmoid(1.5 * features[:, 5] - 0.5), features), LAMBDAS).gate
    assert gate is not None
    assert max(range(len(gate.weights)), key=lambda number: abs(gate.weights[number])) == 5
    assert gate.weights[5] > 1
    assert max(abs(weight) for number, weight in enumerate(gate.weights) if number != 5) < 0.15


def test_weights_against_a_loop() -> None:
    features = noise(400)
    edges = (-0.5, 0.5)
    found = sample(torch.sigmoid(features[:, 0]), features)
    mix = fit_weights("buckets", replace(GIVEN, edges=edges), found, LAMBDAS)
    for number, weight in enumerate(mix.weights):
        mine = [i for i in range(400) if sum(float(features[i, 0]) >= edge for edge in edges) == number]
        losses = []
        for lam in LAMBDAS:
            terms = [lam * math.exp(found.knn_N[i]) + (1 - lam) * math.exp(found.lm_N[i]) for i in mine]
            losses.append(-sum(map(math.log, terms)))
        assert weight == LAMBDAS[int(np.argmin(losses))]


def test_positions_without_neighbours_do_not_matter() -> None:
    found = sample(torch.full((200,), 0.5), noise(200))
    nothing = torch.arange(200) % 3 == 0
    evidence = replace(found.evidence, nearest_N=found.evidence.nearest_N.masked_fill(nothing, -math.inf))
    partly = Sample(found.lm_N, found.knn_N.masked_fill(nothing, math.nan), evidence)
    for variant in ("one weight", "gate"):
        mix = fit_weights(variant, GIVEN, partly, LAMBDAS)
        assert mix == fit_weights(variant, GIVEN, partly[~nothing], LAMBDAS)
        assert partly.log_probs(mix)[nothing].equal(partly.lm_N[nothing])
    for empty in (partly[nothing], partly[nothing][:0]):
        assert torch.isfinite(empty.log_probs(fit_weights("gate", GIVEN, empty, LAMBDAS))).all()


# -- first tokens ----------------------------------------------------------------------------------------------------


def test_the_first_token_has_its_own_weight() -> None:
    """Everywhere else p_kNN is good; at first tokens it never is, whatever the similarity says."""
    read = torch.arange(1000) % 20
    found = sample((read > 0).double(), noise(1000), read)
    for variant in ("one weight", "buckets", "gate"):
        mix = fit_weights(variant, replace(GIVEN, edges=(0.0,)), found, LAMBDAS)
        assert mix.first == 0
        weight = mix.weight_of(found.evidence)
        assert (weight[read == 0] == 0).all()
        assert (weight[read > 0] > 0.5).all()


def test_first_weight_is_careful() -> None:
    few = sample(torch.full((30,), 0.5), noise(30), torch.zeros(30))
    many = sample(torch.full((5000,), 0.5), noise(5000), torch.zeros(5000))
    best = LAMBDAS[int(many.losses(LAMBDAS).mean(1).argmin())]
    assert fit_first(few, LAMBDAS) < fit_first(many, LAMBDAS) <= best
    assert fit_first(few[torch.arange(0)], LAMBDAS) == 0
    always = sample(torch.ones(12), noise(12), torch.zeros(12))
    assert 0 < fit_first(always, (0.0, 0.5, 1.0)) < 1  # never kNN alone, however well it did


# -- the choice ------------------------------------------------------------------------------------------------------


def test_the_gate_is_chosen_where_only_it_can_see() -> None:
    """Similarity says nothing here, the model's entropy everything."""
    features = noise(2000)
    found = sample(torch.sigmoid(3 * features[:, 5]), features)
    samples = {name: (replace(GIVEN, edges=(-0.5, 0.5)), found) for name in ("one weight", "buckets", "gate")}
    choice = choose_weights(samples, torch.arange(2000) // 100, LAMBDAS)
    assert choice.best == "gate"
    assert choice.mixes["gate"].gate is not None
    assert choice.losses["gate"] < min(choice.losses["one weight"], choice.losses["buckets"]) - 0.05


def test_the_gate_is_chosen_where_similarity_is_not_monotone() -> None:
    """Neighbours help in the middle: too similar is as bad as too different."""
    features = noise(2000)
    found = sample((features[:, 0].abs() < 0.7).double(), features)
    choice = choose_weights({n: (GIVEN, found) for n in ("one weight", "gate")}, torch.arange(2000) // 100, LAMBDAS)
    assert choice.best == "gate"
    assert choice.losses["gate"] < choice.losses["one weight"] - 0.1


def test_one_weight_is_chosen_for_noise() -> None:
    found = sample(torch.full((400,), 0.5), noise(400))
    edges = tuple(np.linspace(-1.5, 1.5, 7).tolist())
    samples = {name: (replace(GIVEN, edges=edges), found) for name in ("one weight", "buckets", "gate")}
    choice = choose_weights(samples, torch.arange(400) // 20, LAMBDAS)
    assert choice.best == "one weight"
    again = choose_weights(samples, torch.arange(400) // 20, LAMBDAS)
    assert json.dumps(choice.as_dict()) == json.dumps(again.as_dict())


def test_a_tie_goes_to_the_simplest() -> None:
    found = sample(torch.full((100,), 0.5), noise(100))
    found = Sample(found.lm_N, found.lm_N, found.evidence)  # no weight changes anything
    choice = choose_weights({n: (GIVEN, found) for n in ("one weight", "buckets")}, torch.arange(100) // 20, LAMBDAS)
    assert choice.best == "one weight"


# -- in a run --------------------------------------------------------------------------------------------------------


def test_a_sample_is_what_the_predictor_scores(tiny_run: Run) -> None:
    """The same log-probabilities in two ways: read from tables, and through the prediction step."""
    parts, text = tiny_run.snapshot, tiny_run.snapshot.searched("test")
    variants = tiny_run.artifact("tune").facts["variants"]
    for variant in variants["base"]:
        mixes = {state: Mix.of(variants[state][variant]["mix"]) for state in ("base", "gnn")}
        scored = score_surely(parts.predictor_with(mixes), text, 64, "score", PREDICTORS, ("base", "gnn"))
        for state, name in (("base", "knn"), ("gnn", "gnn_knn")):
            scores = scored.log_probs[state]
            found = sample_text(text, parts.store, scores, mixes[state], scored.sure[state], chunk=50)
            np.testing.assert_allclose(found.log_probs(mixes[state]).numpy(), scored.log_probs[name], atol=2e-5)


def test_a_run_uses_what_is_best_on_valid(tiny_run: Run) -> None:
    facts, report = tiny_run.artifact("tune").facts, read_report(tiny_run.artifact("eval"))
    for state, name in (("base", "knn"), ("gnn", "gnn_knn")):
        variants, rows = facts["variants"][state], report.weights[name]
        best = min(variants, key=lambda variant: variants[variant]["valid_loss"])
        assert facts["mix"][state] == variants[best]["mix"]
        assert [variant for variant, row in rows.items() if row.chosen] == [best]
        assert tiny_run.snapshot.predictor.mixes[state] == Mix.of(variants[best]["mix"])
        assert rows[best].ppl == pytest.approx(report.rows[name].ppl)
        assert rows.keys() == variants.keys() >= {"one weight", "gate"}
    text = markdown(report)
    assert "Weight of kNN in +kNN: one weight: " in text
    assert "Weight of kNN in +GNN+kNN: one weight: " in text


def test_helped_and_hurt_in_nats() -> None:
    without = np.log(np.array([0.5, 0.25, 0.25, 0.5]))
    row = WeightRow.of(np.log(np.array([0.5, 0.5, 0.125, 0.25])), without, math.log(7), True)
    assert (row.helped, row.hurt) == (0.25, 0.5)
    assert row.valid_ppl == pytest.approx(7)
    assert row.gained == pytest.approx(math.log(2) / 4)
    assert row.lost == pytest.approx(math.log(2) / 2)
    assert row.ppl == pytest.approx(math.exp(-without.mean() - row.gained + row.lost))


def test_a_run_tuned_without_a_gate_is_stale(tiny_run: Run, tmp_path: Path) -> None:
    """It is neither opened nor built on: its mixes are not those that the config asks for."""
    place = Path(shutil.copytree(tiny_run.root, tmp_path / "old"))
    inputs = {name: value for name, value in read_manifest(place / "tune").inputs.items() if name != "tune.gate"}
    shutil.rmtree(place / "tune")
    with Draft(place / "tune", "tune", inputs) as draft:
        draft.finish({"mix": {"base": {"k": 4, "temperature": 0.1, "weight": 0.3}}})
    run = Run(load_config(place))
    stage = run.stages["tune"]
    assert run.state(stage) == "stale"
    assert run.why(stage, "stale") == "tune.gate was not set, is now True"
    with pytest.raises(ArtifactError, match=r"made from other inputs: tune\.gate was not set, is now True"):
        gnnlm_module.open(place)
