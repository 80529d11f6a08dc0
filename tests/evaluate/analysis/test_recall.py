"""Neighbour quality: R by a loop, buckets of about the same size, means and intervals by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.evaluate.analysis.target_recall import measure, show
from gnnlm.evaluate.analysis.token_buckets import equal_buckets, recall_counts
from gnnlm.predict.bootstrap import bootstrap_means
from gnnlm.run import Run
from tests.evaluate.analysis.analysed import analysis_of


def test_recall_is_a_count_over_the_retrieved(tiny_run: Run) -> None:
    subject = analysis_of(tiny_run.root).subject
    store, near = subject.snapshot.store, subject.test.table.at(subject.positions_N)
    tokens = [[int(store.tokens(position)) for position in row] for row in near.positions]
    expected = [row.count(target) for row, target in zip(tokens, subject.targets_N.tolist(), strict=True)]
    found = recall_counts(subject.test, store, subject.positions_N, subject.targets_N)
    assert found.tolist() == expected
    assert 0 < found.max() <= near.positions.shape[1]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(1, 6))
def test_buckets_hold_every_value_once(values: list[int], buckets: int) -> None:
    ranges = equal_buckets(np.array(values), buckets)
    assert len(ranges) <= buckets
    assert [value for low, high in ranges for value in sorted(values) if low <= value <= high] == sorted(values)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


def test_buckets_are_of_equal_size_where_values_differ() -> None:
    assert equal_buckets(np.arange(20), 5) == [(0, 3), (4, 7), (8, 11), (12, 15), (16, 19)]


def test_means_and_intervals_by_hand(tiny_run: Run) -> None:
    subject = analysis_of(tiny_run.root).subject
    found = measure(subject)
    counts = recall_counts(subject.test, subject.snapshot.store, subject.positions_N, subject.targets_N)
    assert sum(bucket.tokens for bucket in found.buckets) == found.all.tokens == len(counts)
    base, book = subject.scores["base"], subject.scores["gnn_knn"]
    for bucket in found.buckets:
        assert bucket.low is not None
        assert bucket.high is not None
        here = [n for n, count in enumerate(counts) if bucket.low <= count <= bucket.high]
        before, after = (sum(scores[n] for n in here) / len(here) for scores in (base, book))
        assert (bucket.base, bucket.of("gnn_knn")) == pytest.approx((before, after))
        assert bucket.absolute == pytest.approx(after - before)
        assert bucket.relative == pytest.approx((after - before) / -before)
        assert bucket.absolute_low is not None
        assert bucket.absolute_high is not None
        assert bucket.absolute_low <= bucket.absolute <= bucket.absolute_high
    means = bootstrap_means(book - base, subject.document_N, subject.config.eval.bootstrap, subject.seed)
    whole = found.all
    assert whole.absolute_low == pytest.approx(np.quantile(means, 0.025), abs=0.01)
    assert whole.absolute_high == pytest.approx(np.quantile(means, 0.975), abs=0.01)
    assert math.exp(-whole.absolute) - 1 == pytest.approx(subject.changed(book, base).change)


def test_the_papers_figures_stand_beside_it(tiny_run: Run) -> None:
    section = show(measure(analysis_of(tiny_run.root).subject))
    own, paper = section.tables
    assert paper.cells()[1] == ["[4, 27)", "-", "-3.84", "-3.46", "+0.38", "10%"]
    assert " to " in own.cells()[-1][4]
