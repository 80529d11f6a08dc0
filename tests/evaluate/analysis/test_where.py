"""Where it helps: buckets by hand and by loops, what they add up to, and the command."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from gnnlm.evaluate.analysis.gain_by_kind import GainResult, bucket_of, show
from gnnlm.evaluate.analysis.token_buckets import (
    BEGINS,
    CONTINUES,
    DIGITS,
    GROUPINGS,
    OTHER,
    by_edges,
    by_similarity,
    first_ranks,
    kind_of,
    kinds_of,
    store_counts,
)
from gnnlm.evaluate.tune import bucket_edges
from gnnlm.predict.bootstrap import change_interval
from gnnlm.run import Run
from tests.cli import error_line, gnnlm
from tests.conftest import WriteConfig
from tests.evaluate.analysis.analysed import analysis_of, results_of, scored_of

PARTS = ("surface", "where", "calibration", "words", "examples")


@pytest.mark.parametrize(
    ("pieces", "kinds"),
    [
        (["The", " cat", "s", "."], [BEGINS, BEGINS, CONTINUES, OTHER]),
        (["don", "'t", " 'tis", "’s"], [BEGINS, CONTINUES, BEGINS, CONTINUES]),
        (["snake", "_", "case", "_x"], [BEGINS, OTHER, BEGINS, BEGINS]),
        (["19", "99", "th", " 3", "\n\n", "   "], [DIGITS, DIGITS, CONTINUES, DIGITS, OTHER, OTHER]),
        (["naïve", "té", " Ж", "бур"], [BEGINS, CONTINUES, BEGINS, CONTINUES]),
        (["(", "a", "(b"], [OTHER, BEGINS, BEGINS]),
    ],
)
def test_parts_of_words(pieces: list[str], kinds: list[str]) -> None:
    text, found = "".join(pieces), []
    for piece in pieces:
        start = sum(map(len, pieces[: len(found)]))
        found.append(kind_of(text, start, start + len(piece)))
    assert found == kinds


def test_a_byte_of_a_character_counts_as_the_character() -> None:
    assert kind_of("a é", 2, 2) == BEGINS
    assert kind_of("aé", 1, 1) == CONTINUES
    assert kind_of("a—", 1, 1) == OTHER


def test_edges_belong_to_the_bucket_above() -> None:
    found = by_edges(np.array([0.05, 0.1, 0.9, 0.5]), (0.1, 0.5), ("low", "middle", "high"))
    assert [(name, here.tolist()) for name, here in found] == [("low", [0]), ("middle", [1]), ("high", [2, 3])]
    assert bucket_edges(torch.ones(5), 5) == [1.0]
    assert bucket_edges(torch.tensor([]), 5) == []


def test_counts_and_ranks_by_loop(tiny_run: Run) -> None:
    subject = analysis_of(tiny_run.root).subject
    store, vocabulary = subject.snapshot.store, int(subject.targets_N.max()) + 1
    counted = Counter(int(token) for token in np.asarray(subject.snapshot.streams["train"].tokens) if token >= 0)
    assert store_counts(store, vocabulary).tolist() == [counted[token] for token in range(vocabulary)]
    near = subject.test.table.at(subject.positions_N)
    tokens = store.tokens(near.positions).tolist()
    expected = [row.index(t) + 1 if t in row else 0 for row, t in zip(tokens, subject.targets_N.tolist(), strict=True)]
    assert first_ranks(subject).tolist() == expected


def test_every_grouping_holds_every_token_once(tiny_run: Run) -> None:
    results_of(tiny_run, "where")
    subject, scored = analysis_of(tiny_run.root).subject, scored_of(tiny_run)
    for grouping in GROUPINGS:
        numbers = np.concatenate([here for _, here in grouping.buckets(subject, scored)])
        assert sorted(numbers.tolist()) == list(range(len(subject.positions_N))), grouping.name
    first = dict(by_similarity(subject, scored))["first token"]
    assert first.tolist() == np.flatnonzero(subject.place_N == 0).tolist()
    kinds = kinds_of(subject.snapshot.streams["test"])
    assert len(kinds) == len(subject.positions_N)


def test_a_bucket_by_hand(tiny_run: Run) -> None:
    subject = analysis_of(tiny_run.root).subject
    here = np.flatnonzero(subject.place_N < 16)
    row = bucket_of(subject, "early", here)
    gains = [float(subject.scores["gnn"][i] - subject.scores["base"][i]) for i in here]
    assert row.tokens == len(here)
    gnn = row.predictors["gnn"]
    assert gnn.nats == pytest.approx(sum(gains) / len(gains))
    assert gnn.change == pytest.approx(math.exp(-sum(gains) / len(gains)) - 1)
    low, high = change_interval(np.array(gains), subject.document_N[here], 50, subject.seed) or (None, None)
    assert (gnn.change_low, gnn.change_high) == (low, high)
    whole = float((subject.scores["gnn"] - subject.scores["base"]).sum())
    assert gnn.share_of_gain == pytest.approx(sum(gains) / whole)
    assert row.base.change == 0


def test_buckets_add_up_to_the_report(tiny_run: Run) -> None:
    found = results_of(tiny_run, "where")["where"]
    rows = analysis_of(tiny_run.root).subject.report.rows
    for group in found["groups"]:
        assert sum(bucket["share"] for bucket in group["buckets"]) == pytest.approx(1)
        nats = sum(bucket["tokens"] * bucket["gnn_knn"]["nats"] for bucket in group["buckets"]) / found["tokens"]
        assert math.exp(-nats) - 1 == pytest.approx(rows["gnn_knn"].change, rel=1e-4)


def test_shown(tiny_run: Run) -> None:
    found = results_of(tiny_run, "where")["where"]
    section = show(GainResult.model_validate(found))
    assert len(section.tables) == len(section.figures) == len(GROUPINGS)
    assert "Significantly worse than base" in section.sentences[-1]  # kNN, where the target is not retrieved
    assert '"not among them"' in section.sentences[-1]
    lost = json.loads(json.dumps(found))
    for group in lost["groups"]:
        for bucket in group["buckets"]:
            bucket["gnn_knn"] |= {"change_low": None, "change_high": None}
            bucket["knn"]["change_low"] = -0.5
    assert show(GainResult.model_validate(lost)).sentences[-1].startswith("In no bucket of at least 50 tokens")


def test_the_command_makes_the_parts(tiny_run: Run) -> None:
    root = analysis_of(tiny_run.root).root
    asked = [word for part in PARTS for word in ("--part", part)]
    done = gnnlm("analyze", root.parent, *asked, "--json")
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(PARTS) <= set(results)
    page, text = (root / "index.html").read_text(), (root / "analysis.md").read_text()
    for title in ("Tuning surface", "Where it helps", "Calibration", "Words helped and hurt", "Examples"):
        assert f'-title">{title}</h2>' in page
        assert f"## {title}" in text
    assert (root / "where" / "where_place.csv").read_text().startswith("tokens before it in its document,")


def test_without_a_network_or_a_gate(write_config: WriteConfig) -> None:
    config = write_config(gnn={"layers": 0}, tune={"gate": False, "buckets": 1})
    gnnlm("run", config)
    asked = [word for part in PARTS for word in ("--part", part)]
    results = json.loads(gnnlm("analyze", config.parent / "run", *asked, "--json").stdout.splitlines()[-1])
    assert list(results["surface"]["predictors"]) == ["knn"]
    assert [row["used"] for row in results["surface"]["predictors"]["knn"]["weights"]] == [True]
    assert results["where"]["predictor"] == "knn"
    assert list(results["calibration"]["predictors"]) == ["base", "knn"]
    assert "no part named 'were'" in error_line("analyze", config.parent / "run", "--part", "were")
