"""How long search takes on this machine, measured on made-up keys: what does not depend on the text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import torch

from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.faiss_index import FaissIndex
from gnnlm.retrieval.index import Rows

clock: Callable[[], float] = time.perf_counter  # benchmarks on a busy machine count the processor's time instead
ROWS, QUERIES = 16_384, 32
TRIES, A_TRY = 4, 0.1  # how often, and for how many seconds each, a search is timed
LISTS = 64  # of the inverted index that is timed
LIST_QUERIES = 256  # enough that a list has about as many queries as in a batch of the search stage


@dataclass(frozen=True)
class SearchCosts:
    """Seconds of a query: for each row that it is compared with, and for each neighbour that it finds."""

    row: float
    neighbour: float

    def query(self, rows: float, k: int) -> float:
        return rows * self.row + min(k, rows) * self.neighbour


def timed(work: Callable[[], object], seconds: float = 0.2) -> float:
    """The mean seconds of a piece of work, the first time left out unless it takes long itself.

    The mean, not the best: a run will meet the same interruptions by other programs.
    """
    began = clock()
    work()
    first = clock() - began
    if first > 4 * seconds:
        return first
    count, began = 0, clock()
    while not count or clock() - began < seconds:
        work()
        count += 1
    return (clock() - began) / count


def _solved(a_query: Callable[[float], float], k: int) -> SearchCosts:
    """The two costs, from the seconds of a query over all rows and over a quarter of them, the least of some each.

    They come from a difference, which an interruption of one of them would spoil.
    """
    tried = [(a_query(1.0), a_query(0.25)) for _ in range(TRIES)]
    seconds, faster = min(all_ for all_, _ in tried), min(some for _, some in tried)
    row = max((seconds - faster) / (0.75 * ROWS), 0.1 * seconds / ROWS)
    return SearchCosts(row, max(0.0, faster - 0.25 * ROWS * row) / k)


def time_exact(width: int, k: int, device: str) -> SearchCosts:
    """The costs of exact search at this k."""
    keys_RD = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).to(device)
    keys_RD = torch.nn.functional.normalize(keys_RD, dim=1)
    k = min(k, ROWS // 8)

    def a_query(share: float) -> float:
        rows = int(share * ROWS)
        index = ExactIndex(keys_RD[:rows], torch.arange(rows, device=device), "cosine")
        return timed(lambda: index.search(keys_RD[:QUERIES], k), A_TRY) / QUERIES

    return _solved(a_query, k)


def time_inverted(width: int, k: int, code: str) -> SearchCosts:
    """The costs of searching the lists of an inverted index, with rows of this code (`Flat`, `SQ4`, `PQ64`...)."""
    keys = np.random.default_rng(0).standard_normal((ROWS, width), dtype=np.float32)
    made = faiss.index_factory(width, f"IVF{LISTS},{code}", faiss.METRIC_L2)
    inner: Any = faiss.downcast_index(faiss.extract_index_ivf(made))
    inner.cp.niter = 2
    if isinstance(inner, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan):
        inner.pq.cp.niter = 1
        inner.pq.cp.min_points_per_centroid = 1
    if hasattr(inner, "do_polysemous_training"):
        inner.do_polysemous_training = False
    made.train(keys[: ROWS // 2])
    made.add(keys)
    index = FaissIndex(made, keys, Rows(torch.tensor([0, ROWS + 1])), "l2")
    queries_ND, k = torch.from_numpy(keys[:LIST_QUERIES]), min(k, ROWS // 8)

    def a_query(share: float) -> float:
        inner.nprobe = int(share * LISTS)
        return timed(lambda: index.search(queries_ND, k), A_TRY) / len(queries_ND)

    return _solved(a_query, k)
