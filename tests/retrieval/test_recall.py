"""Recall of an index against exact search: by hand, and against FAISS's flat index."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
import torch

from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.index import as_keys
from gnnlm.retrieval.index_recall import recall_of
from gnnlm.retrieval.neighbours import Neighbours
from gnnlm.retrieval.open_index import open_exact
from gnnlm.run import Run


def exact(keys: list[list[float]], positions: list[int], metric: str = "l2") -> ExactIndex:
    return ExactIndex(as_keys(torch.tensor(keys), metric), torch.tensor(positions), metric)


def found(*positions: list[int]) -> Neighbours:
    """Positions as an index found them; its own similarities must not matter."""
    return Neighbours(torch.tensor(positions), torch.zeros(len(positions), len(positions[0])))


def test_by_hand() -> None:
    index = exact([[0.0], [1.0], [2.0], [5.0]], [3, 4, 7, 9])
    keys = torch.tensor([[0.0], [2.1]])  # nearest first: 3, 4, 7, 9 and 7, 4, 3, 9
    assert recall_of(found([4, 3, 9], [7, 3, 9]), keys, index, [1, 2, 3]) == {1: 0.5, 2: 0.75, 3: 2 / 3}


def test_rows_as_near_as_the_last_one_count() -> None:
    """Of three rows at the same place, an index may return any; a row that is not so near is not among them."""
    index = exact([[1.0], [1.0], [1.0], [2.0]], [0, 1, 2, 3])
    assert recall_of(found([2], [3]), torch.tensor([[1.0], [1.0]]), index, [1]) == {1: 0.5}
    assert recall_of(found([2, 1, 0]), torch.tensor([[1.0]]), index, [1, 2]) == {1: 1.0, 2: 1.0}


def test_missing_neighbours_and_small_stores() -> None:
    index = exact([[0.0], [1.0]], [0, 5])
    assert recall_of(found([0, -1, -1]), torch.tensor([[0.0]]), index, [1, 3]) == {1: 1.0, 3: 0.5}
    assert recall_of(found([5, 0, -1]), torch.tensor([[0.0]]), index, [3]) == {3: 1.0}


@pytest.mark.parametrize("seed", range(3))
def test_against_faiss(seed: int) -> None:
    """Without ties recall is the overlap of the two sets of rows."""
    rng = np.random.default_rng(seed)
    keys, queries = (rng.normal(size=(n, 16)).astype(np.float32) for n in (400, 50))
    keys, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (keys, queries))
    flat = faiss.IndexFlatIP(16)
    flat.add(keys)
    rough = faiss.index_factory(16, "IVF16,Flat", faiss.METRIC_INNER_PRODUCT)
    rough.train(keys)
    rough.add(keys)
    rough.nprobe = 3
    ks = [1, 10, 40]
    true, near = flat.search(queries, 40)[1], rough.search(queries, 40)[1]
    wanted = {k: np.mean([len({*a[:k]} & {*b[:k]}) / k for a, b in zip(true, near, strict=True)]) for k in ks}
    index = ExactIndex(torch.from_numpy(keys), torch.arange(400), "cosine")
    got = recall_of(Neighbours(torch.from_numpy(near), torch.zeros(50, 40)), torch.from_numpy(queries), index, ks)
    assert got == pytest.approx(wanted)
    assert 0.2 < got[40] < 1  # it can fail


def test_an_exact_run_has_recall_one(tiny_run: Run) -> None:
    encoded, test = tiny_run.artifact("encode"), tiny_run.snapshot.searched("test")
    positions = torch.arange(0, len(test.text), 17)
    keys = torch.from_numpy(np.array(encoded.array("test.states.npy")))[positions]
    index = open_exact(encoded, tiny_run.snapshot.streams["train"], "cosine")
    assert set(recall_of(test.table.at(positions), keys, index, [1, 10, 16]).values()) == {1.0}
