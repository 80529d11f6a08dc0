"""Stores of part of the documents: neighbours against FAISS over the remaining rows, nested parts, resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.artifact import Draft
from gnnlm.evaluate.analysis import growth
from gnnlm.evaluate.analysis.growth import SHARES, SizeChange, StoreSize, fitted, nested, sized
from gnnlm.evaluate.analysis.subject import Subject, fitting
from gnnlm.predict.split_scoring import score_text
from gnnlm.retrieval.index import as_keys, keys_of
from gnnlm.retrieval.neighbours import NeighbourTable
from gnnlm.run import Run
from gnnlm.run.analyze import Analysis
from tests.cli import gnnlm
from tests.evaluate.analysis.copies import copied_run


@pytest.fixture(scope="module")
def subject(tiny_run: Run) -> Subject:
    return Analysis(tiny_run).subject


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 3000), st.integers(0, 9))
def test_drawn_documents_fit(sizes: list[int], most: int, seed: int) -> None:
    drawn = fitting(np.array(sizes), most, seed)
    total = sum(sizes[number] for number in drawn)
    assert list(drawn) == sorted(set(drawn))
    assert total <= most or (len(drawn) == 1 and total == min(sizes) > most)
    assert all(total + size > most for number, size in enumerate(sizes) if number not in drawn)  # no more would fit


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80))
def test_nested_sizes(tokens: list[int]) -> None:
    counts = nested(np.array(tokens), SHARES)
    assert counts[-1] == len(tokens)
    assert counts == sorted(set(counts))
    half = min(range(len(tokens)), key=lambda last: abs(sum(tokens[: last + 1]) - sum(tokens) / 2)) + 1
    assert half in counts


def test_whole_documents_are_drawn(subject: Subject) -> None:
    drawn, stream = subject.sample_documents(500), subject.snapshot.streams["test"]
    assert 0 < len(drawn.tokens_N) <= 500
    tokens = np.asarray(stream.tokens)[drawn.positions_P.numpy()]
    assert np.array_equal(tokens[tokens >= 0], subject.targets_N.numpy()[drawn.tokens_N])
    assert (tokens < 0).sum() == len(drawn.documents)


def test_the_whole_store_scores_as_the_report(subject: Subject) -> None:
    drawn = subject.sample_documents(500)
    scores = sized(subject, subject.snapshot.index, drawn, np.arange(len(subject.snapshot.streams["train"].starts) - 1))
    for name, values in scores.items():
        np.testing.assert_allclose(values, subject.scores[name][drawn.tokens_N], atol=2e-5)


def test_a_part_of_the_store_against_faiss(subject: Subject) -> None:
    """Only rows of the kept documents are found, and all of these can be."""
    drawn, kept = subject.sample_documents(500), np.array([1, 4])
    stream, encoded, test = subject.snapshot.streams["train"], subject.artifact("encode"), subject.test
    rows = np.concatenate([np.arange(stream.starts[n], stream.starts[n + 1] - 1) for n in kept])
    keys = as_keys(torch.from_numpy(np.array(keys_of(encoded, "train")))[rows], "cosine")
    flat = faiss.IndexFlatIP(keys.shape[1])
    flat.add(keys.numpy())
    asked = torch.from_numpy(np.array(encoded.array("test.states.npy")))[drawn.positions_P]
    predictor = subject.snapshot.predictor
    k = predictor.neighbours_needed(predictor.names)
    similarity, near = flat.search(as_keys(asked, "cosine").numpy(), k)
    text = replace(test, table=NeighbourTable(rows[near], similarity, drawn.positions_P))
    wanted, _ = score_text(predictor, text, 40, "score", predictor.names, drawn.positions_P)
    found = sized(subject, subject.snapshot.index, drawn, kept)
    for name in predictor.names:
        assert found[name].mean() == pytest.approx(wanted[name].mean(), abs=1e-3)  # equal similarities may swap rows
    assert np.array_equal(found["base"], wanted["base"])
    assert found["knn"].mean() < subject.scores["knn"][drawn.tokens_N].mean()  # less text helps less


def test_the_fit_and_what_ten_times_would_bring() -> None:
    """Losses on a line in log size: each tenfold brings the same again."""
    shares = (0.01, 0.1, 1.0)
    unknown = {"ppl": 1.0, "change": 0.0, "change_low": None, "change_high": None}
    changes = [SizeChange(loss=2.0 - 0.1 * np.log10(share), **unknown) for share in shares]
    rows = [
        StoreSize(tokens=1, documents=1, share=share, predictors={"knn": change})
        for share, change in zip(shares, changes, strict=True)
    ]
    fit = fitted(rows, "knn")
    assert fit is not None
    assert fit.ten_times == pytest.approx(np.exp(1.9))
    assert fit.change == pytest.approx(np.exp(-0.1) - 1)
    assert fit.other is None
    assert fitted(rows[:2], "knn") is None


def test_through_the_command(tiny_run: Run, tmp_path: Path) -> None:
    run = copied_run(tiny_run, tmp_path)
    done = gnnlm("analyze", run.root, "--part", "growth", "--json")
    found = json.loads(done.stdout.splitlines()[-1])["growth"]
    last, report = found["sizes"][-1], json.loads((run.root / "report" / "report.json").read_text())
    assert [size["tokens"] for size in found["sizes"]] == sorted(size["tokens"] for size in found["sizes"])
    assert last["share"] == 1
    assert found["tokens"] == report["test_tokens"]
    for name, row in last["predictors"].items():
        assert row["ppl"] == pytest.approx(report["rows"][name]["ppl"], rel=1e-6)
    history = json.loads((run.root / "gnn" / "history.json").read_text())
    assert [entry["step"] for entry in found["history"]] == [entry["step"] for entry in history]
    assert found["history"][-1]["ppl"] == pytest.approx(np.exp(history[-1]["valid_gnn"]))
    assert {"growth.png", "growth_steps.png", "growth.csv"} <= {
        path.name for path in (run.root / "analysis/growth").iterdir()
    }


def test_interrupted_and_resumed(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = list[int](), growth.sized

    def counted(*given: Any) -> Any:
        calls.append(len(given[3]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)

    with Draft(tmp_path / "whole", "part", {}) as draft:
        wanted = growth.measure(subject, draft)
    monkeypatch.setattr(growth, "sized", counted)
    with pytest.raises(KeyboardInterrupt), Draft(tmp_path / "part", "part", {}) as draft:
        growth.measure(subject, draft)
    with Draft(tmp_path / "part", "part", {}) as draft:
        assert growth.measure(subject, draft) == wanted
    assert len(calls) == len(wanted.sizes)  # one more for the interruption, one less because the whole is known
    assert calls == sorted(calls)
