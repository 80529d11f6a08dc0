"""What an index costs: its bytes, how much a query is compared with, and how long that takes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import torch

from gnnlm.config import IndexConfig
from gnnlm.retrieval.auto_index import BESIDE_A_CODE, MANY_CLUSTERS, factory_of, resolved
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.faiss_build import empty_index
from gnnlm.retrieval.faiss_index import FaissIndex
from gnnlm.retrieval.index import Rows

clock: Callable[[], float] = time.perf_counter  # benchmarks on a busy machine count the processor's time instead
ROWS = 16_384
TRIES, A_TRY = 4, 0.1  # how often, and for how many seconds each, a search is timed
LISTS = 64  # of the inverted index that is timed
EXACT_QUERIES = 32
ON_A_PATH = 2_000.0  # clusters that a key is compared with on its path through an HNSW graph of them
LIST_QUERIES = 256  # a list has about as many queries as in a batch of the search stage


@dataclass(frozen=True)
class IndexShape:
    """An inverted index: its clusters, how many of them a query searches, and the code of a row."""

    clusters: int
    probes: int
    code: str  # of the factory string
    code_bytes: int
    width: int  # of the coded vectors

    @property
    def clusters_compared(self) -> float:
        """The number of clusters that a key is compared with to find its own; many are searched through a graph."""
        return self.clusters if self.clusters <= MANY_CLUSTERS else ON_A_PATH

    @property
    def row_bytes(self) -> float:
        """The bytes of a row in memory."""
        return float(self.code_bytes + BESIDE_A_CODE)

    @property
    def centroid_bytes(self) -> float:
        return 4.0 * self.clusters * self.width

    def rows_scanned(self, rows: int) -> float:
        """Return how many of so many rows are in the clusters that a query searches."""
        return rows * min(1.0, self.probes / self.clusters)


def index_shape(config: IndexConfig, rows: int, width: int) -> IndexShape | None:
    """Return the shape of the index over so many rows; None for exact search.

    An index of another kind, such as HNSW32, counts as one with whole keys in the usual number of clusters.

    >>> index_shape(IndexConfig(kind="PCA32,IVF64,PQ16x4fs"), 100_000, 48)
    IndexShape(clusters=64, probes=32, code='PQ16x4fs', code_bytes=8, width=32)
    """
    config = resolved(config, rows, width)
    if config.kind == "exact":
        return None
    index = empty_index(config, width, rows)  # owns what is extracted from it
    inverted: Any = faiss.try_extract_index_ivf(index)
    if inverted is None:
        return IndexShape(config.clusters_of(rows), config.probes, "Flat", 4 * width, width)
    code = factory_of(config, rows).rsplit(",", 1)[-1]
    return IndexShape(inverted.nlist, config.probes, code, inverted.code_size, inverted.d)


@dataclass(frozen=True)
class SearchCosts:
    """Seconds of a query: for each row that it is compared with, and for each neighbour that it finds."""

    row: float
    neighbour: float


def timed(work: Callable[[], object], seconds: float = 0.2) -> float:
    """Return the mean seconds of a piece of work, leaving out the first time unless it takes long itself.

    The mean, not the minimum: a run will meet the same interruptions by other programs.
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


def exact_costs(width: int, k: int, device: str) -> SearchCosts:
    """Measure exact search at this k."""
    keys_RD = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).to(device)
    keys_RD = torch.nn.functional.normalize(keys_RD, dim=1)
    queries_ND, k = keys_RD[:EXACT_QUERIES], min(k, ROWS // 8)

    def seconds(share: float) -> float:
        rows = int(share * ROWS)
        index = ExactIndex(keys_RD[:rows], torch.arange(rows, device=device), "cosine")
        return timed(lambda: index.search(queries_ND, k), A_TRY) / EXACT_QUERIES

    return _costs(seconds, k)


def inverted_costs(width: int, k: int, code: str) -> SearchCosts:
    """Measure the search in an inverted index's lists, with rows of this code (`Flat`, `SQ4`, `PQ64`...)."""
    keys = np.random.default_rng(0).standard_normal((ROWS, width), dtype=np.float32)
    made = faiss.index_factory(width, f"IVF{LISTS},{code}", faiss.METRIC_L2)
    inner: Any = faiss.downcast_index(faiss.extract_index_ivf(made))
    inner.cp.niter = 2  # the clusters need not be good
    if hasattr(inner, "pq"):
        inner.pq.cp.niter = 1
        inner.pq.cp.min_points_per_centroid = 1
    if hasattr(inner, "do_polysemous_training"):
        inner.do_polysemous_training = False
    made.train(keys[: ROWS // 2])
    made.add(keys)
    index = FaissIndex(made, keys, Rows(torch.tensor([0, ROWS + 1])), "l2")
    queries_ND, k = torch.from_numpy(keys[:LIST_QUERIES]), min(k, ROWS // 8)

    def seconds(share: float) -> float:
        inner.nprobe = int(share * LISTS)
        return timed(lambda: index.search(queries_ND, k), A_TRY) / LIST_QUERIES

    return _costs(seconds, k)


def _costs(seconds: Callable[[float], float], k: int) -> SearchCosts:
    """Solve for both costs, given how to time a query over a share of the rows.

    The row's cost is a difference of two timings. An interruption of one would spoil it, so each is the least of some.
    """
    tries = [(seconds(1.0), seconds(0.25)) for _ in range(TRIES)]
    whole = min(first for first, _ in tries)
    quarter = min(second for _, second in tries)
    row = max((whole - quarter) / (0.75 * ROWS), 0.1 * whole / ROWS)
    return SearchCosts(row, max(0.0, quarter - 0.25 * ROWS * row) / k)
