"""The search of inverted lists, one list after the other: each is decoded once, and compared with all its queries.

FAISS goes through the lists of every query by itself. Of a batch, many queries look into the same list. So here a
list's codes are decoded once for all of them, and one matrix product compares their rows with the queries. The
similarities are those of the decoded keys, in float32.

Shapes: N queries, P lists that each looks into, R rows of a list, D width of the codes, k neighbours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from threading import Lock
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.retrieval.index import Rows

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
SCORES_AT_ONCE = 2**25  # scores of some queries: 128 MB of float32
SIGN = np.int32(0x7FFFFFFF)


class _Space:
    """Memory for scores and decoded rows that all searches of this process use in turn: fresh pages take time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._held: dict[str, Floats] = {}

    def of(self, name: str, size: int) -> Floats:
        if name not in self._held or len(self._held[name]) < size:
            self._held[name] = np.empty(size, np.float32)
        return self._held[name][:size]


SPACE = _Space()


@dataclass(frozen=True)
class Assigned:
    """Queries with the lists that each looks into, nearest first; the same for every segment."""

    keys_ND: Tensor  # as they came
    queries: Floats  # as the lists have their rows: after the transforms of the index
    lists_NP: Numbers

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, lines: npt.NDArray[Any]) -> Assigned:
        return Assigned(self.keys_ND[torch.from_numpy(lines)], self.queries[lines], self.lists_NP[lines])


class Lists:
    """The inverted lists of a FAISS index whose codes can be decoded."""

    def __init__(self, index: Any, rows: Rows) -> None:
        self._index = index
        self._ivf = _inverted(index)
        lists, self.count = self._ivf.invlists, int(self._ivf.nlist)
        self._sizes = np.array([lists.list_size(number) for number in range(self.count)])
        self._begins = np.concatenate([[0], np.cumsum(self._sizes)])
        ids = [_viewed(lists.get_ids(number), rows) for number, rows in enumerate(self._sizes.tolist())]
        positions = rows.positions(torch.from_numpy(np.concatenate(ids).astype(np.int64)))
        self._positions = positions.numpy().astype(np.int32 if int(rows.starts[-1]) < 2**31 else np.int64)
        self._centroids = torch.from_numpy(_centroids(self._ivf))
        self._half = _is_half(self._ivf)

    @staticmethod
    def of(index: Any, rows: Rows) -> Lists | None:
        """The lists of an index; None if it has none, or if FAISS packs their codes for its own scan."""
        ivf = faiss.try_extract_index_ivf(index)
        kinds = (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)
        outer = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
        if ivf is None or type(outer) not in kinds or index.metric_type != faiss.METRIC_L2:
            return None
        return Lists(index, rows)

    def assign(self, keys_ND: Tensor, queries: Floats, probes: int) -> Assigned:
        """The lists nearest to each query."""
        chain: Any = self._index.chain if isinstance(self._index, faiss.IndexPreTransform) else None
        for number in range(0 if chain is None else chain.size()):
            queries = chain.at(number).apply(queries)
        lists_NP = self._ivf.quantizer.search(np.ascontiguousarray(queries), min(probes, self.count))[1]
        return Assigned(keys_ND, queries, lists_NP)

    def search(
        self,
        asked: Assigned,
        k: int,
        barred: tuple[Numbers, Numbers] | None = None,
        open_P: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Numbers, Floats]:
        """The k nearest positions of each query in its lists, and minus their squared distances, [N, k].

        `barred` bounds the positions, low..high, that each query may not find; `open_P` says which positions all may.
        """
        positions, scores = np.full((len(asked), k), -1), np.full((len(asked), k), -np.inf, np.float32)
        rows_N = self._sizes[asked.lists_NP].sum(1)
        cuts = np.flatnonzero(np.diff(np.cumsum(rows_N) // SCORES_AT_ONCE)) + 1
        for first, last in itertools.pairwise([0, *cuts.tolist(), len(asked)]):
            some = slice(first, last)
            part = Assigned(asked.keys_ND[some], asked.queries[some], asked.lists_NP[some])
            bounds = None if barred is None else (barred[0][some], barred[1][some])
            with SPACE.lock:
                found, begins_NP = self._scores(part, open_P)
                self._nearest(part.lists_NP, found, begins_NP, bounds, positions[some], scores[some])
        return positions, scores

    def _scores(self, asked: Assigned, open_P: npt.NDArray[np.bool_] | None) -> tuple[Floats, Numbers]:
        """Minus the squared distances of queries and rows, list by list; and where those of each pair begin, [N, P]."""
        probes = max(1, asked.lists_NP.shape[1])
        lists = asked.lists_NP.ravel()
        order = np.argsort(lists, kind="stable")
        first = np.flatnonzero(np.diff(lists[order], prepend=-1))
        queries_ND = torch.from_numpy(asked.queries)
        found = SPACE.of("scores", int(self._sizes[lists[lists >= 0]].sum()))
        begins, done = np.zeros(len(lists), np.int64), 0
        for low, high in itertools.pairwise([*first.tolist(), len(order)]):
            number, pairs = int(lists[order[low]]), order[low:high]
            rows = int(self._sizes[number]) if number >= 0 else 0  # a graph of clusters may find too few
            begins[pairs] = done + rows * np.arange(len(pairs))
            if not rows:
                continue
            block = torch.from_numpy(found[done : done + rows * len(pairs)]).view(-1, rows)
            self._compare(queries_ND[torch.from_numpy(pairs // probes)], number, block)
            if open_P is not None:
                here = self._positions[self._begins[number] : self._begins[number + 1]]
                block[:, torch.from_numpy(~open_P[here])] = -torch.inf
            done += rows * len(pairs)
        return found, begins.reshape(asked.lists_NP.shape)

    def _compare(self, queries_nD: Tensor, number: int, out_nR: Tensor) -> None:
        """Fill in minus the squared distances from a list's rows: both are taken from its centroid, to round less."""
        near_nD, rows_RD = queries_nD - self._centroids[number], self._residuals(number)
        torch.addmm(rows_RD.square().sum(1).neg_(), near_nD, rows_RD.T, alpha=2, out=out_nR)
        out_nR.sub_(near_nD.square().sum(1, keepdim=True))

    def _residuals(self, number: int) -> Tensor:
        """A list's rows, minus its centroid."""
        rows, centroid_D = int(self._sizes[number]), self._centroids[number]
        width = len(centroid_D)
        out_RD = torch.from_numpy(SPACE.of("decoded", rows * width)).view(rows, width)
        codes = self._ivf.invlists.get_codes(number)
        if self._half:
            halves = _viewed(codes, rows * self._ivf.code_size).view(np.float16)
            out_RD.copy_(torch.from_numpy(halves).view(out_RD.shape))
            return out_RD if self._ivf.by_residual else out_RD.sub_(centroid_D)
        lists = np.full(rows, number, np.int64)
        self._ivf.decode_vectors(rows, codes, faiss.swig_ptr(lists), faiss.swig_ptr(out_RD.numpy()))
        return out_RD.sub_(centroid_D)

    def _nearest(
        self,
        lists_NP: Numbers,
        found: Floats,
        begins_NP: Numbers,
        barred: tuple[Numbers, Numbers] | None,
        positions_Nk: Numbers,
        scores_Nk: Floats,
    ) -> None:
        """Fill in the best of each query, by (score, position)."""
        rows, sizes_NP = self._begins[lists_NP].tolist(), np.where(lists_NP < 0, 0, self._sizes[lists_NP]).tolist()
        for line, (starts, sizes) in enumerate(zip(begins_NP.tolist(), sizes_NP, strict=True)):
            scores = np.concatenate([found[at : at + size] for at, size in zip(starts, sizes, strict=True)])
            parts = [self._positions[at : at + size] for at, size in zip(rows[line], sizes, strict=True)]
            positions = np.concatenate(parts)
            if barred is not None and barred[0][line] <= barred[1][line]:
                scores[(positions >= barred[0][line]) & (positions <= barred[1][line])] = -np.inf
            best = best_of(scores, positions, positions_Nk.shape[1])
            positions_Nk[line, : len(best[0])], scores_Nk[line, : len(best[1])] = best


def best_of(scores: Floats, positions: npt.NDArray[Any], k: int) -> tuple[Numbers, Floats]:
    """The k best scores with their positions, best first, ties by position; entries of minus infinity are left out.

    One sort does it: a score's bits, turned so that larger scores come first, above the bits of its position.

    >>> scores, positions = np.array([1, 3, 3, -np.inf], np.float32), np.array([4, 9, 7, 1])
    >>> [part.tolist() for part in best_of(scores, positions, 3)]
    [[7, 9, 4], [3.0, 3.0, 1.0]]
    """
    if len(scores) > k:
        kept = np.argpartition(scores, len(scores) - k)[len(scores) - k :]
        last = scores[kept[0]]
        if np.count_nonzero(scores >= last) > k:  # of those that are as good as the last, all are looked at
            kept = np.flatnonzero(scores >= last)
        scores, positions = scores[kept], positions[kept]
    if len(scores) and np.isneginf(scores.min()):
        real = ~np.isneginf(scores)
        scores, positions = scores[real], positions[real]
    if positions.dtype == np.int64 and len(positions) and positions.max() >= 2**32:
        order = np.lexsort((positions, -scores))[:k]
        return positions[order].astype(np.int64), scores[order]
    bits = (scores + np.float32(0)).view(np.int32)  # minus zero becomes zero
    order = (~(bits ^ ((bits >> 31) & SIGN))).astype(np.int64) << 32 | positions
    order.sort()
    order = order[:k]
    bits = ~(order >> 32).astype(np.int32)
    return order & 0xFFFFFFFF, (bits ^ ((bits >> 31) & SIGN)).view(np.float32)


def _inverted(index: Any) -> Any:
    return faiss.downcast_index(faiss.extract_index_ivf(index))


def _viewed(pointer: Any, length: int) -> npt.NDArray[Any]:
    """An array over memory that belongs to FAISS."""
    return faiss.rev_swig_ptr(pointer, length) if length else np.empty(0, np.uint8)


def _centroids(ivf: Any) -> Floats:
    found: Floats = ivf.quantizer.reconstruct_n(0, ivf.nlist)
    return found


def _is_half(ivf: Any) -> bool:
    return isinstance(ivf, faiss.IndexIVFScalarQuantizer) and ivf.sq.qtype == faiss.ScalarQuantizer.QT_fp16
