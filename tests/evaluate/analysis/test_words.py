"""Words helped and hurt: sorted, drawn and counted as said."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest

from gnnlm.evaluate.analysis import word_gains
from gnnlm.evaluate.analysis.word_gains import DRAWN, ENDS, GAINS, WordsResult, measure, show
from gnnlm.run import Run
from tests.evaluate.analysis.analysed import analysis_of, results_of


def test_buckets_ends_and_draws(tiny_run: Run) -> None:
    found = results_of(tiny_run, "words")["words"]
    subject = analysis_of(tiny_run.root).subject
    gains = subject.scores["gnn_knn"] - subject.scores["base"]
    stream = subject.snapshot.streams["test"]
    pieces = [stream.text_between(p, p + 1) for p in subject.positions_N.tolist()]
    alphabetic = [i for i, piece in enumerate(pieces) if any(c.isalpha() for c in piece)]
    assert found["words"] == len(alphabetic) == sum(bucket["words"] for bucket in found["buckets"])
    assert sum(bucket["nats"] for bucket in found["buckets"]) == pytest.approx(float(gains[alphabetic].sum()))
    ordered = sorted(float(gains[i]) for i in alphabetic)
    assert [example["gain"] for example in found["worst"]] == ordered[:ENDS]
    assert [example["gain"] for example in found["best"]] == ordered[::-1][:ENDS]
    for low, high, bucket in zip((-math.inf, *GAINS), (*GAINS, math.inf), found["buckets"], strict=True):
        assert bucket["words"] == sum(low <= gain < high for gain in ordered)
        assert len(bucket["drawn"]) == min(DRAWN, bucket["words"])
        assert all(low <= example["gain"] < high for example in bucket["drawn"])
    for example in (*found["best"], *found["worst"]):
        before, after = example["probabilities"]["base"], example["probabilities"]["gnn_knn"]
        assert math.log(after / before) == pytest.approx(example["gain"], abs=1e-6)
        assert len(example["neighbours"]) == 3


def test_drawn_by_the_seed_and_not_by_the_gain(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = analysis_of(tiny_run.root).subject
    again = measure(subject)
    assert again == measure(subject)
    monkeypatch.setattr(type(subject), "seed", 1)
    other = measure(subject)
    assert [bucket.drawn for bucket in other.buckets] != [bucket.drawn for bucket in again.buckets]
    assert (other.best, other.worst) == (again.best, again.worst)


def test_vocabulary_by_loop(tiny_run: Run) -> None:
    found = results_of(tiny_run, "words")["words"]["types"]
    subject = analysis_of(tiny_run.root).subject
    total: dict[str, float] = defaultdict(float)
    times: dict[str, int] = defaultdict(int)
    gains = subject.scores["gnn_knn"] - subject.scores["base"]
    for i, position in enumerate(subject.positions_N.tolist()):
        piece = subject.snapshot.streams["test"].text_between(position, position + 1)  # a byte: one piece, one token
        total[piece] += float(gains[i])
        times[piece] += 1
    letters = sorted((total[piece], piece) for piece in total if piece.isalpha())
    assert [row["word"] for row in found["helped"]] == [piece for _, piece in letters[::-1][:ENDS]]
    for row in (*found["helped"], *found["hurt"]):
        assert row["times"] == times[row["word"]]
        assert row["nats"] == pytest.approx(total[row["word"]])
        assert row["mean"] == pytest.approx(row["nats"] / row["times"])
    assert [row["nats"] for row in found["hurt"]] == [nats for nats, _ in letters[:ENDS] if nats < 0]


def test_shown_with_all_sides(tiny_run: Run) -> None:
    section = show(WordsResult.model_validate(results_of(tiny_run, "words")["words"]))
    names = [table.name for table in section.tables]
    assert [name for name in names if "types" not in name] == [
        "words_buckets",
        "words_drawn",
        "words_worst",
        "words_best",
    ]
    drawn = next(table for table in section.tables if table.name == "words_drawn")
    assert not drawn.sorts
    assert word_gains.NAMES[-1] in drawn.csv()


def test_a_text_without_words(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = analysis_of(tiny_run.root).subject
    monkeypatch.setattr(word_gains, "kinds_of", lambda stream: ["digits"] * len(subject.positions_N))
    found = measure(subject)
    assert (found.words, found.best, found.types) == (0, [], {"helped": [], "hurt": []})
    assert np.isfinite([bucket.nats for bucket in found.buckets]).all()
    assert show(found).sentences[1].startswith("0 of 0 test words")
