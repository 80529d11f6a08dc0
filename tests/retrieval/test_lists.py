"""Inverted lists searched list by list find what FAISS finds in them, and what a loop over all rows finds."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.artifact import draft as drafts
from gnnlm.config import IndexConfig, parse_config
from gnnlm.retrieval import auto_index, faiss_build, faiss_index, ivf_scan, top_k
from gnnlm.retrieval import search as search_module
from gnnlm.retrieval.faiss_index import FaissIndex
from gnnlm.retrieval.index import Allowed, Rows, keys_of
from gnnlm.retrieval.index_recall import recall_of
from gnnlm.retrieval.ivf_scan import InvertedLists
from gnnlm.retrieval.open_index import open_exact
from gnnlm.retrieval.segmented import SegmentedIndex
from gnnlm.retrieval.top_k import SPACE, NearestRows
from gnnlm.run import Run
from tests.conftest import merge

WIDTH, ROWS = 16, 400
FACTORIES = ["IVF8,Flat", "IVF8,SQfp16", "PCA8,IVF8,SQ4", "IVF8,SQ8", "OPQ4_8,IVF8,PQ4x4", "IVF8_HNSW8,Flat"]


def built(factory: str, keys: Any) -> Any:
    index = faiss.index_factory(WIDTH, factory, faiss.METRIC_L2)
    index.train(keys)
    index.add(keys)
    return index


def as_one_document(keys: Any) -> Rows:
    return Rows(torch.tensor([0, len(keys) + 1]))


@pytest.fixture(scope="module")
def keys() -> Any:
    rng = np.random.default_rng(0)
    return (rng.normal(size=(12, WIDTH))[rng.integers(12, size=ROWS)] * 2 + rng.normal(size=(ROWS, WIDTH))).astype("f4")


@given(data=st.data(), k=st.integers(1, 12), rows=st.integers(1, 9), barred=st.booleans())
def test_the_nearest(data: st.DataObject, k: int, rows: int, barred: bool) -> None:
    """Whatever pieces come in whatever order: what one sort of all by (distance, position) gives."""
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    low, high = rng.integers(60, size=4), rng.integers(60, size=4)
    wanted: list[list[tuple[float, int]]] = [[] for _ in range(4)]
    with SPACE.lock:
        kept = NearestRows(4, k, rows, (low, high) if barred else None)
        for first in range(0, 60, rows):
            positions = np.arange(first, min(first + rows, 60), dtype=np.int32)[::-1].copy()
            lines = np.flatnonzero(rng.random(4) < 0.8)
            distances = rng.choice(np.float32([0, 0.5, 1, 3, np.inf]), size=(len(lines), len(positions)))
            kept.add(lines, distances, positions)
            for line, own in zip(lines, distances, strict=True):
                pairs = zip(own.tolist(), positions.tolist(), strict=True)
                wanted[line] += [(d, at) for d, at in pairs if not (barred and low[line] <= at <= high[line])]
        found, scores = np.empty((4, k), np.int64), np.empty((4, k), np.float32)
        kept.fill(found, scores)
    for line in range(4):
        want = [(d, at) for d, at in sorted(wanted[line]) if d < np.inf][:k]
        assert found[line].tolist() == [at for _, at in want] + [-1] * (k - len(want))
        assert (-scores[line]).tolist() == [d for d, _ in want] + [np.inf] * (k - len(want))


@pytest.mark.parametrize("factory", FACTORIES)
def test_lists_are_searched_as_faiss_does(factory: str, keys: Any) -> None:
    """The same rows at the same distances, from the same lists, however the queries are cut."""
    index, queries = built(factory, keys), keys[::7] + np.float32(0.1)
    found = InvertedLists.of(index, as_one_document(keys))
    assert found is not None
    for probes in (1, 3, 8):
        faiss.extract_index_ivf(index).nprobe = probes
        distances, rows = index.search(queries, 30)
        asked = found.assign(torch.from_numpy(queries), queries, probes)
        positions, scores = found.search(asked, 30)
        there = rows >= 0
        assert ((positions >= 0) == there).all()
        np.testing.assert_allclose(-scores[there], distances[there], rtol=1e-3, atol=1e-3)
        assert np.mean((positions == rows)[there]) > 0.97  # all but near ties
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(top_k, "NUMBERS_AT_ONCE", 700)
            patch.setattr(ivf_scan, "PIECE", 7)
            again, _ = found.search(asked, 30)
        assert np.mean((positions == again)[there]) > 0.97


@given(data=st.data())
def test_filters_apply_inside(data: st.DataObject, keys: Any) -> None:
    """What a loop finds among the rows that are open and not barred."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    found = InvertedLists.of(built("IVF8,Flat", keys), as_one_document(keys))
    assert found is not None
    queries, k = keys[rng.integers(ROWS, size=5)], data.draw(st.integers(1, ROWS))
    low = rng.integers(ROWS, size=5)
    high = low + rng.integers(-1, 200, size=5)
    open_P = np.append(rng.random(ROWS) < data.draw(st.sampled_from([0.02, 0.5, 1.0])), False)
    asked = found.assign(torch.from_numpy(queries), queries, 8)
    positions, scores = found.search(asked, k, (low, high), open_P)
    for n, query in enumerate(queries):
        allowed = [at for at in range(ROWS) if open_P[at] and not low[n] <= at <= high[n]]
        distances = np.sort(np.square(keys[allowed] - query).sum(1))[:k]
        assert (positions[n] >= 0).sum() == min(k, len(allowed))
        assert set(positions[n][positions[n] >= 0].tolist()) <= set(allowed)
        np.testing.assert_allclose(-scores[n, : len(distances)], distances, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("rule", ["none", "barred", "open"])
def test_few_queries_find_what_many_find(factory: str, rule: str, keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAISS scans the lists of a few queries: the same rows, ties by position, under any filter."""
    keys = np.concatenate(
        [keys[:100], np.repeat(keys[100:103], 40, axis=0), keys[100:]]
    )  # 40 are the same, three times
    index = FaissIndex(built(factory, keys), keys, as_one_document(keys), "l2")
    assert index._ivf is not None
    index._ivf.nprobe = 3
    queries_ND = torch.from_numpy(keys[95:110] + np.float32(0.01))
    low = torch.arange(90, 105)
    open_P = torch.rand(len(keys) + 1, generator=torch.Generator().manual_seed(0)) < 0.6
    allowed = {"none": None, "barred": Allowed((low, low + 60)), "open": Allowed(None, open_P)}[rule]
    monkeypatch.setattr(faiss_index, "NARROW", 10)
    for k in (1, 20, 50, 200):
        monkeypatch.setattr(faiss_index, "WORTH", 0)
        many = index.search(queries_ND, k, allowed)
        monkeypatch.setattr(faiss_index, "WORTH", np.inf)
        few = index.search(queries_ND, k, allowed)
        assert bool((few.positions[:, :1] == many.positions[:, :1]).all())
        assert float((few.positions == many.positions).float().mean()) > 0.97  # all but near ties
        torch.testing.assert_close(few.similarity, many.similarity, rtol=1e-3, atol=1e-3)


def test_what_faiss_packs_for_itself_is_left_to_it(keys: Any) -> None:
    for factory in ("IVF8,PQ8x4fs", "IVF8,RaBitQ", "HNSW8", "Flat"):
        assert InvertedLists.of(built(factory, keys), as_one_document(keys)) is None


# -- every kind, over several segments -----------------------------------------------------------------------------

KINDS: list[Any] = [
    ("exact", {}),
    ("ivf", {}),
    ("auto", {}),
    ("auto", {"memory_gb": 1e-9}),
    ("IVF8,PQ8x4fs", {}),
    ("PCA16,IVF8,RaBitQ", {}),
    ("HNSW8", {}),
    pytest.param("paper", {"bytes": 8, "clusters": 8}, marks=pytest.mark.slow),  # OPQ of 8 bits takes a minute
]


@pytest.fixture(scope="module")
def in_segments(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny run's store, in several segments."""
    root = tmp_path_factory.mktemp("segments") / "run"
    values = merge(tiny_run.config.model_dump(mode="json"), {"run": str(root), "store": {"segment_tokens": 1500}})
    run = Run(parse_config(values))
    for name in ("corpus", "encode", "codec"):
        run.build(name)
    assert len(run.snapshot.streams["train"].segments) > 2
    return run


def searched(run: Run, root: Path, **changes: Any) -> Run:
    new = Run(parse_config(merge(run.config.model_dump(mode="json"), {"run": str(root), **changes})))
    run.fork(new.config)
    for name in ("corpus", "encode", "index", "search"):
        new.build(name)
    return new


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_every_kind_over_segments(
    kind: str, more: dict[str, Any], in_segments: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_index, "EXACT_ROWS", 100)
    monkeypatch.setattr(faiss_build, "LEVELS", 1)
    run = searched(in_segments, tmp_path / "run", index={"kind": kind, "probes": 6, **more})
    facts = run.artifact("index").facts
    if kind == "auto":
        assert facts["asked"] == "auto"
        assert facts["kind"].endswith("SQ8" if more else "SQfp16")
        assert ("more than index.memory_gb" if more else "fits into index.memory_gb") in facts["why"]
    if kind != "exact":
        assert set(facts["recall"]) == {"1", "10", "128", "1024"}
    encoded, stream = run.artifact("encode"), run.snapshot.streams["train"]
    exact = open_exact(encoded, stream, "cosine")
    keys_ND = torch.from_numpy(np.array(keys_of(encoded, "valid")[:40]))
    found = run.snapshot.index.search(keys_ND, 10)
    assert recall_of(found, keys_ND, exact, [10])[10] > 0.5
    assert bool((found.similarity[:, :-1] >= found.similarity[:, 1:]).all())
    if kind in ("exact", "ivf", "IVF8,PQ8x4fs", "PCA16,IVF8,RaBitQ") or facts["kind"].endswith("SQfp16"):
        torch.testing.assert_close(found.similarity, exact.similarity(keys_ND, found.positions), atol=1e-3, rtol=1e-3)
    again = Run(run.config)
    assert again.state(again.stages["index"]) == "done"


def test_queries_are_assigned_once(in_segments: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_index, "WORTH", 0)
    run = searched(in_segments, tmp_path / "run", index={"kind": "ivf", "probes": 3})
    keys_ND, asked = torch.from_numpy(np.array(keys_of(run.artifact("encode"), "valid")[:9])), []
    assign = InvertedLists.assign

    def counted(self: InvertedLists, *given: Any) -> Any:
        asked.append(self)
        return assign(self, *given)

    monkeypatch.setattr(InvertedLists, "assign", counted)
    index = run.snapshot.index
    assert isinstance(index, SegmentedIndex)
    found = index.search(keys_ND, 12)
    assert len(asked) == 1
    each = [index.segment(number).search(keys_ND, 12) for number in range(len(index.rows))]
    best = torch.cat([near.similarity for near in each], dim=1).sort(dim=1, descending=True).values[:, :12]
    torch.testing.assert_close(found.similarity, best)
    barred = (torch.full((9,), 100), torch.full((9,), 2000))
    positions = index.search(keys_ND, 12, Allowed(barred)).positions
    assert not ((positions >= 100) & (positions <= 2000)).any()


def test_the_factory_string_of_paper() -> None:
    assert auto_index.factory_of(IndexConfig(kind="paper"), 1_000_000) == "OPQ64,IVF4000,PQ64"


def test_what_auto_chooses_depends_on_sizes_alone() -> None:
    def kind(rows: int, width: int, **more: Any) -> str:
        return auto_index.choose_index(IndexConfig(kind="auto", **more), rows, width).kind

    assert kind(65_536, 576) == "exact"
    assert kind(65_537, 576) == "IVF512,SQfp16"
    assert kind(10_000_000, 576, memory_gb=6) == "IVF6324,SQ8"
    assert kind(10_000_000, 576) == "PCA384,IVF6324,SQ8"
    assert kind(10_000_000, 576, memory_gb=2.1) == "PCA192,IVF6324,SQ8"
    assert kind(10_000_000, 576, memory_gb=1.5) == "PCA256,IVF6324,PQ128"
    assert kind(10_000_000, 576, memory_gb=20) == "IVF6324,SQfp16"
    assert kind(10_000_000, 576, memory_gb=0.8, clusters=4096) == "PCA128,IVF4096,PQ64"
    assert kind(10_000_000, 32, memory_gb=0.01) == "PCA16,IVF6324,SQ8"
    assert kind(10_000_000_000, 1024) == "PCA32,IVF200000_HNSW32,PQ16"


def test_a_full_disk_in_the_middle_of_search_loses_nothing(
    in_segments: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was searched is kept, and the same command ends in the same bytes."""
    changes: dict[str, Any] = {"index": {"kind": "ivf"}, "search": {"shard_queries": 200}}
    whole = searched(in_segments, tmp_path / "whole", **changes)
    append, calls, done = drafts.ArrayWriter.append, [0], [0]
    work = search_module.SplitNeighbours.make

    def full(self: Any, rows: Any) -> None:
        calls[0] += 1
        if calls[0] == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, rows)

    def counted(*given: Any, **more: Any) -> Any:
        done[0] += 1
        return work(*given, **more)

    monkeypatch.setattr(search_module.SplitNeighbours, "make", counted)
    monkeypatch.setattr(drafts.ArrayWriter, "append", full)
    with pytest.raises(OSError, match="No space"):
        searched(in_segments, tmp_path / "run", **changes)
    before, calls[0] = done[0], 100
    run = Run(parse_config(merge(whole.config.model_dump(mode="json"), {"run": str(tmp_path / "run")})))
    run.build("search")
    assert before >= 4
    tables = (run.artifact("search").array(f"{split}.ids.npy") for split in ("train", "valid", "test"))
    shards = sum(-(-len(table) // 200) for table in tables)
    assert done[0] == shards + 1  # only the shard that could not be appended was searched twice
    for name in whole.artifact("search").manifest.files:
        assert (run.path("search") / name).read_bytes() == (whole.path("search") / name).read_bytes()
