"""Exact search against numpy and FAISS, approximate search against exact, filters, and the leakage rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.artifact import Draft
from gnnlm.config import IndexConfig
from gnnlm.errors import ConfigError
from gnnlm.retrieval import auto_index, faiss_build
from gnnlm.retrieval import exact as exact_module
from gnnlm.retrieval import faiss_index as module
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.faiss_build import check_index, fill_index, train_index, training_rows
from gnnlm.retrieval.faiss_index import FaissIndex
from gnnlm.retrieval.index import Allowed, Index, Rows, keys_of
from gnnlm.retrieval.index_build import build_index
from gnnlm.retrieval.open_index import open_index
from gnnlm.retrieval.search import LeakageRule, Queries
from gnnlm.run import Run


def make_index(tmp_path: Path, states: Any, config: IndexConfig, positions: Any = None) -> Index:
    """The configured index over all states, looking into every list."""
    states = np.asarray(states, dtype=np.float32)
    places = np.arange(len(states)) if positions is None else positions
    keys = np.zeros((int(places.max()) + 1, states.shape[1]), dtype=np.float32)
    keys[places] = states
    if config.kind == "exact":
        return ExactIndex.over(keys, torch.from_numpy(places), config.metric)
    return faiss_over(tmp_path, keys, rows_at(places), config)


def faiss_over(tmp_path: Path, keys: Any, rows: Rows, config: IndexConfig) -> FaissIndex:
    trained, filled = tmp_path / "trained.faiss", tmp_path / "index.faiss"
    faiss.write_index(train_index(keys, rows, config, seed=0), str(trained))
    fill_index(trained, keys, rows, config.metric, filled)
    return module.open_faiss_index(filled, keys, rows, config.metric, probes=10_000)


def rows_at(places: Any) -> Rows:
    """Rows at these positions: documents end at all others."""
    size = int(places.max()) + 1
    ends = np.setdiff1d(np.arange(size + 1), places)
    rows = Rows(torch.from_numpy(np.concatenate([[0], ends + 1])))
    assert rows.all().tolist() == places.tolist()
    return rows


def exact(states: Any, metric: str = "cosine") -> ExactIndex:
    keys = np.asarray(states, dtype=np.float32)
    return ExactIndex.over(keys, torch.arange(len(keys)), metric)


def similarities(queries: Any, states: Any, metric: str) -> Any:
    queries, states = np.asarray(queries, dtype=np.float64), np.asarray(states, dtype=np.float64)
    if metric == "cosine":
        a = queries / np.linalg.norm(queries, axis=1, keepdims=True)
        b = states / np.linalg.norm(states, axis=1, keepdims=True)
        return a @ b.T
    return -((queries[:, None] - states[None]) ** 2).sum(-1)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("kind", ["exact", "ivf", "IVF4,Flat", "PCA8,Flat"])
def test_against_numpy(metric: str, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    states, queries = rng.normal(size=(200, 8)) + 1, rng.normal(size=(20, 8)) + 1
    index = make_index(tmp_path, states, IndexConfig(metric=metric, kind=kind))  # type: ignore[arg-type]
    found = index.search(torch.from_numpy(queries), 10)
    want = similarities(queries, states, metric)
    order = np.argsort(-want, axis=1)[:, :10]
    assert (found.positions.numpy() == order).mean() > 0.99
    np.testing.assert_allclose(found.similarity, np.take_along_axis(want, order, 1), rtol=1e-3, atol=1e-4)
    assert found.similarity.dtype == torch.float32


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_exact_search_is_what_faiss_finds(metric: str) -> None:
    rng = np.random.default_rng(1)
    states = (rng.normal(size=(3000, 48)) + 1).astype(np.float32)
    queries = (rng.normal(size=(40, 48)) + 1).astype(np.float32)
    index = exact(states, metric)
    flat = faiss.IndexFlatIP(48) if metric == "cosine" else faiss.IndexFlatL2(48)
    flat.add(index.keys_RD.numpy())
    scores, rows = flat.search(exact_module.as_keys(torch.from_numpy(queries), metric).numpy(), 100)
    found = index.search(torch.from_numpy(queries), 100)
    assert np.mean([len(np.intersect1d(a, b)) / 100 for a, b in zip(found.positions.numpy(), rows, strict=True)]) == 1
    np.testing.assert_allclose(found.similarity, scores if metric == "cosine" else -scores, rtol=1e-4, atol=1e-5)


@given(
    rows=st.integers(1, 60),
    copies=st.integers(1, 8),
    k=st.integers(1, 40),
    cut=st.integers(1, 12),
    metric=st.sampled_from(["cosine", "l2"]),
    seed=st.integers(0, 999),
)
def test_batches_find_the_same_rows(rows: int, copies: int, k: int, cut: int, metric: str, seed: int) -> None:
    """Alone or together, also among rows that are equal: ties are broken by position."""
    rng = np.random.default_rng(seed)
    states = torch.from_numpy(np.tile(rng.normal(size=(rows, 24)) + 2, (copies, 1)).astype(np.float32))
    index, queries = exact(states, metric), states[rng.integers(len(states), size=13)]
    whole = index.search(queries, k)
    parts = [index.search(part, k) for part in queries.split(cut)]
    assert torch.equal(torch.cat([part.positions for part in parts]), whole.positions)
    assert torch.equal(torch.cat([part.similarity for part in parts]), whole.similarity)
    keys = exact_module.as_keys(states, metric)
    for query, line in zip(exact_module.as_keys(queries, metric), whole.positions.tolist(), strict=True):
        each = [float((key * query).sum() if metric == "cosine" else -(key - query).square().sum()) for key in keys]
        want = sorted(range(len(states)), key=lambda row: (-each[row], row))[: len(line)]
        assert line == want


@pytest.mark.parametrize(
    "kind",
    ["ivf", "OPQ8,IVF16,PQ8x4", pytest.param("paper", marks=pytest.mark.slow)],  # OPQ of 8 bits takes a minute
)
def test_approximate_search_finds_most_of_what_exact_search_finds(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recall is measured against exact search, and batches of 1 and of 9 find the same rows."""
    monkeypatch.setattr(faiss_build, "LEVELS", 1)  # learn codes from fewer rows than is wise
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(40, 16)) * 3
    states = centres[rng.integers(40, size=4000)] + rng.normal(size=(4000, 16))
    queries = torch.from_numpy(centres[rng.integers(40, size=45)] + rng.normal(size=(45, 16)))
    index = make_index(tmp_path, states, IndexConfig(kind=kind, bytes=8, clusters=16))
    assert isinstance(index, FaissIndex)
    index._ivf.nprobe = 6
    want = exact(states).search(queries, 20).positions.numpy()
    found = index.search(queries, 20)
    recall = np.mean([len(np.intersect1d(a, b)) / 20 for a, b in zip(found.positions.numpy(), want, strict=True)])
    assert recall > {"ivf": 0.95, "paper": 0.6}.get(kind, 0.4)
    for size in (1, 9):
        parts = torch.cat([index.search(part, 20).positions for part in queries.split(size)])
        assert torch.equal(parts, found.positions)


def test_k_larger_than_the_index(tmp_path: Path) -> None:
    index = make_index(tmp_path, np.eye(3), IndexConfig(), np.array([4, 7, 9]))
    found = index.search(torch.eye(3), 10)
    assert found.positions.shape == (3, 3)
    assert found.positions[:, 0].tolist() == [4, 7, 9]


@pytest.mark.parametrize("kind", ["nonsense", "IDMap,Flat"])
def test_bad_factory_string(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"index\.kind '{kind}'"):
        check_index(IndexConfig.model_construct(kind=kind, clusters=None, bytes=8), 8, 100)


@pytest.mark.parametrize("kind", ["exact", "IVF32,Flat", "ivf", "PCA8,IVF16,Flat"])
@given(data=st.data())
def test_filters_leave_k_neighbours(kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """However narrow or wide a filter is, the k nearest of what it leaves open are found, as far as there are k."""
    rows = 900
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    states = rng.normal(size=(rows, 8)) + 1
    queries = torch.from_numpy(rng.normal(size=(5, 8)) + 1)
    share = data.draw(st.sampled_from([0.0, 0.003, 0.2, 0.9, 1.0]))
    open_P = torch.from_numpy(np.append(rng.random(rows) < share, False))  # the last position has no token
    low = torch.from_numpy(rng.integers(rows, size=5))
    high = low + data.draw(st.integers(0, 300))
    index = make_index(tmp_path_factory.mktemp("index"), states, IndexConfig(kind=kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NARROW", data.draw(st.sampled_from([0, 50])))
        if isinstance(index, FaissIndex):
            index._ivf.nprobe = 1  # too few lists for a filter: more must be looked into
        found = index.search(queries, 7, Allowed((low, high), open_P))
    want = similarities(queries.numpy(), states, "cosine")
    for n in range(5):
        allowed = [j for j in range(rows) if open_P[j] and not low[n] <= j <= high[n]]
        got = [j for j in found.positions[n].tolist() if j >= 0]
        assert set(got) <= set(allowed)
        if kind == "exact":
            assert got == sorted(allowed, key=lambda j: (-np.float32(want[n, j]), j))[:7]
        elif share < 1:  # lists are only widened where a filter is the reason
            assert len(got) == min(7, len(allowed))
        assert torch.isneginf(found.similarity[n, len(got) :]).all()


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
    k = min(k, total)
    document = np.searchsorted(starts, positions, side="right") - 1
    rule = LeakageRule(field, max(left, right), whole)
    low, high = rule.excluded(positions, starts[document], starts[document + 1] - 1)
    allowed = Allowed((torch.from_numpy(low), torch.from_numpy(high)))
    result = exact(states).search(torch.from_numpy(states), k, allowed)
    want = similarities(states, states, "cosine")
    for t in range(total):
        open_rows = [j for j in range(total) if j < low[t] or j > high[t]]
        found = [j for j in result.positions[t].tolist() if j >= 0]
        scores = result.similarity[t].numpy()
        assert len(found) == min(k, len(open_rows))  # real neighbours remain: excluded before the cut, not after
        assert set(found) <= set(open_rows)
        best = sorted((want[t, j] for j in open_rows), reverse=True)[: len(found)]
        np.testing.assert_allclose(scores[: len(found)], best, atol=1e-4)
        assert np.isneginf(scores[len(found) :]).all()
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
    carried=st.integers(0, 3),
)
def test_a_continuous_text_leaks_across_documents(
    lengths: list[int], field: int, reach: int, whole: bool, carried: int
) -> None:
    """Where the LM reads on, what it has read of the documents before counts; positions past an end do not."""
    starts = np.cumsum([0, *lengths])
    positions = np.arange(int(starts[-1]))
    document = np.searchsorted(starts, positions, side="right") - 1
    places = positions - document
    rule = LeakageRule(field, reach, whole, carried)
    low, high = rule.excluded(positions, starts[document], starts[document + 1] - 1, places)
    for t in positions:
        for j in positions:
            barred = low[t] <= j <= high[t]
            near = abs(places[j] - places[t]) <= field + reach + carried
            assert barred == (near or (whole and document[j] == document[t]))


def test_codes_need_rows_to_learn_from() -> None:
    with pytest.raises(ConfigError, match=r"paper needs at least 9,984 rows .* has 1,500; use exact"):
        check_index(IndexConfig(kind="paper", bytes=8), 16, 1500)
    with pytest.raises(ConfigError, match=r"index\.bytes must divide 16"):
        check_index(IndexConfig(kind="paper", bytes=7), 16, 20_000)


def test_clusters_leave_rows_to_train_each() -> None:
    assert IndexConfig(kind="ivf").clusters_of(1500) == 1500 // 39
    assert IndexConfig(kind="ivf").clusters_of(1_000_000) == 4000
    assert IndexConfig(kind="ivf").clusters_of(3) == 1
    assert training_rows(2**20, 768_000_000) == 39 * 2**20
    assert training_rows(4096, 100_000_000) == 262_144


def test_many_clusters_are_found_through_a_graph(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faiss_build, "TRAIN_ROWS", 8)
    monkeypatch.setattr(auto_index, "MANY_CLUSTERS", 16)
    store, stream = tiny_run.artifact("encode"), tiny_run.snapshot.streams["train"]
    made = build_index(
        Draft(tmp_path / "index", "index", {}), store, stream, IndexConfig(kind="ivf", clusters=40), seed=0
    )
    queries = torch.from_numpy(np.array(store.array("valid.states.npy")[:50]))
    found = open_index(made, store, stream, probes=40).search(queries, 5).positions.numpy()
    want = tiny_run.snapshot.index.search(queries, 20).positions.numpy()
    assert np.mean([np.isin(a, b).mean() for a, b in zip(found, want, strict=True)]) > 0.9


def test_what_queries_may_find(tiny_run: Run) -> None:
    stream = tiny_run.snapshot.streams["train"]
    keys = keys_of(tiny_run.artifact("encode"), "train")
    positions = np.array([5, len(stream) - 1])
    rule = LeakageRule(3, 1, False)
    allowed = Queries(stream, keys, positions, 4, rule).allowed(positions, None)
    assert allowed is not None
    assert allowed.barred is not None
    low, high = allowed.barred
    assert low.tolist() == [1, len(stream) - 5]
    assert high.tolist() == [9, len(stream) - 1]
    assert Queries(stream, keys, positions, 4).allowed(positions, None) is None
