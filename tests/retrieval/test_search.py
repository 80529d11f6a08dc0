"""FAISS against numpy, and the leakage rule."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.artifact import Draft
from gnnlm.config import IndexConfig
from gnnlm.errors import ConfigError
from gnnlm.retrieval import index as index_module
from gnnlm.retrieval.index import Index, as_keys, build_index, empty_index, open_index, train_index, training_rows
from gnnlm.retrieval.search import LeakageRule, search_outside
from gnnlm.run import Run


def make_index(states: np.ndarray, config: IndexConfig | None = None, positions: np.ndarray | None = None) -> Index:
    config = config or IndexConfig()
    keys = as_keys(states, config.metric)
    index = train_index(keys, config, len(keys), seed=0)
    index.add(keys)
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf.nprobe = ivf.nlist
    return Index(index, np.arange(len(keys)) if positions is None else positions, config.metric)


def similarities(queries: np.ndarray, states: np.ndarray, metric: str) -> np.ndarray:
    if metric == "cosine":
        a = queries / np.linalg.norm(queries, axis=1, keepdims=True)
        b = states / np.linalg.norm(states, axis=1, keepdims=True)
        return a @ b.T
    return -((queries[:, None] - states[None]) ** 2).sum(-1)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("kind", ["exact", "ivf", "IVF4,Flat", "PCA8,Flat"])
def test_against_numpy(metric: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    states, queries = rng.normal(size=(200, 8)) + 1, rng.normal(size=(20, 8)) + 1
    index = make_index(states, IndexConfig(metric=metric, kind=kind))  # type: ignore[arg-type]
    ids, got = index.search(queries, 10)
    want = similarities(queries, states, metric)
    order = np.argsort(-want, axis=1)[:, :10]
    assert (ids == order).mean() > 0.99
    np.testing.assert_allclose(got, np.take_along_axis(want, order, 1), rtol=1e-3, atol=1e-4)
    assert got.dtype == np.float32


def test_k_larger_than_the_index() -> None:
    index = make_index(np.eye(3), positions=np.array([4, 7, 9]))
    ids, _ = index.search(np.eye(3), 10)
    assert ids.shape == (3, 3)
    assert ids[:, 0].tolist() == [4, 7, 9]


def test_bad_factory_string() -> None:
    with pytest.raises(ConfigError, match=r"index\.kind 'nonsense' cannot be built"):
        train_index(np.eye(4, dtype=np.float32), IndexConfig(kind="nonsense"), 4, 0)


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=6),
    field=st.integers(1, 12),
    left=st.integers(0, 2),
    right=st.integers(0, 2),
    whole=st.booleans(),
    k=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_no_leaked_window_node_is_ever_retrieved(
    lengths: list[int], field: int, left: int, right: int, whole: bool, k: int, seed: int
) -> None:
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(total, 4)).cumsum(0)  # neighbours in the text are neighbours in space
    positions = np.arange(total)
    index = make_index(states)
    k = min(k, total)
    document = np.searchsorted(starts, positions, side="right") - 1
    rule = LeakageRule(field, max(left, right), whole)
    low, high = rule.excluded(positions, starts[document], starts[document + 1] - 1)
    ids, scores = search_outside(index, states, low, high, k)
    want = similarities(states, states, "cosine")
    for t in range(total):
        allowed = [j for j in range(total) if j < low[t] or j > high[t]]
        found = [j for j in ids[t] if j >= 0]
        assert len(found) == min(k, len(allowed))  # real neighbours remain: excluded before the cut, not after
        assert set(found) <= set(allowed)
        best = sorted((want[t, j] for j in allowed), reverse=True)[: len(found)]
        np.testing.assert_allclose(scores[t, : len(found)], best, atol=1e-4)
        assert np.isneginf(scores[t, len(found) :]).all()
        for j in found:
            if document[j] != document[t]:
                continue
            assert not whole
            for node in range(j - left, j + right + 1):
                assert abs(node - t) > field


@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=6),
    field=st.integers(1, 12),
    reach=st.integers(0, 2),
    whole=st.booleans(),
)
def test_a_continuous_text_leaks_across_documents(lengths: list[int], field: int, reach: int, whole: bool) -> None:
    """Where the LM reads on, what it has read of the documents before counts; positions past an end do not."""
    starts = np.cumsum([0, *lengths])
    positions = np.arange(int(starts[-1]))
    document = np.searchsorted(starts, positions, side="right") - 1
    places = positions - document
    rule = LeakageRule(field, reach, whole)
    low, high = rule.excluded(positions, starts[document], starts[document + 1] - 1, places)
    for t in positions:
        for j in positions:
            barred = low[t] <= j <= high[t]
            near = abs(places[j] - places[t]) <= field + reach
            assert barred == (near or (whole and document[j] == document[t]))


def test_product_quantized_index() -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(600, 16)) + 2
    index = make_index(states, IndexConfig(kind="ivfpq", bytes=8, clusters=4, probes=4))
    ids, _ = index.search(states[:50], 10)
    assert (ids == np.arange(50)[:, None]).any(1).mean() > 0.9
    with pytest.raises(ConfigError, match=r"index\.bytes must divide the width 16"):
        empty_index(IndexConfig(kind="ivfpq", bytes=7), 16, 600)


@pytest.mark.parametrize("kind", ["ivf", "IVF40,Flat"])
def test_more_clusters_than_rows_are_usually_sampled(
    kind: str, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as One Billion Word has; so many that they are found through a graph."""
    assert training_rows(2**20, 768_000_000) == 8 * 2**20
    assert training_rows(4096, 100_000_000) == 262_144
    monkeypatch.setattr(index_module, "TRAIN_ROWS", 8)
    monkeypatch.setattr(index_module, "MANY_CLUSTERS", 16)
    config = IndexConfig(kind=kind, clusters=40)
    store, stream = tiny_run.artifact("encode"), tiny_run.streams["train"]
    made = build_index(Draft(tmp_path / "index", "index", {}), store, stream, config, seed=0)
    queries = np.asarray(store.array("valid.states.npy")[:50])
    found = open_index(made, probes=40).search(queries, 5)[0]
    want = make_index(np.asarray(store.array("train.states.npy")), IndexConfig())
    exact = want.search(queries, 20)[0]
    assert np.mean([np.isin(a, b).mean() for a, b in zip(found, exact, strict=True)]) > 0.9
