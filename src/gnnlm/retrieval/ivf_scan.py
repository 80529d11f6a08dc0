"""The search of inverted lists, one list after the other: each is decoded once, and compared with all its queries.

FAISS goes through the lists of every query by itself. Of a batch, many queries look into the same list. So here a
list's codes are decoded once for all of them, and one matrix product compares their rows with the queries. The
similarities are those of the decoded keys, in float32.

The distance of the k-th nearest row so far is a bound: of further lists, only rows within it are kept (`nearest.py`).
So a batch holds a few times k rows of each query, not all that it is compared with.

Shapes: N queries, P lists that each looks into, R rows of a list, D width of the codes, k neighbours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.retrieval.index import Rows
from gnnlm.retrieval.top_k import SPACE, Floats, NearestRows, Numbers

PIECE = 2048  # rows of a list that are compared at once


@dataclass(frozen=True)
class QueryAssignment:
    """Queries with the lists that each looks into, nearest first; the same for every segment."""

    keys_ND: Tensor  # as they came
    queries: Floats  # as the lists have their rows: after the transforms of the index
    lists_NP: Numbers

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, lines: npt.NDArray[Any]) -> QueryAssignment:
        return QueryAssignment(self.keys_ND[torch.from_numpy(lines)], self.queries[lines], self.lists_NP[lines])


class InvertedLists:
    """The inverted lists of a FAISS index whose codes can be decoded."""

    def __init__(self, index: Any, rows: Rows) -> None:
        self._index = index
        self._ivf = _inverted(index)
        lists = self._ivf.invlists
        self.count = int(self._ivf.nlist)
        self._sizes = np.array([lists.list_size(number) for number in range(self.count)])
        self._begins = np.concatenate([[0], np.cumsum(self._sizes)])
        ids = [_viewed(lists.get_ids(number), rows) for number, rows in enumerate(self._sizes.tolist())]
        positions = rows.positions(torch.from_numpy(np.concatenate(ids).astype(np.int64)))
        self._positions = positions.numpy().astype(np.int32)
        self._codes = _codes_of(self._ivf)
        self._anchors = self._codes.anchors(torch.from_numpy(_centroids(self._ivf)))

    @staticmethod
    def of(index: Any, rows: Rows) -> InvertedLists | None:
        """Return the lists of an index; None if it has none, FAISS packs the codes, or positions exceed 32 bits."""
        ivf = faiss.try_extract_index_ivf(index)
        kinds = (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)
        outer = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
        if ivf is None or type(outer) not in kinds or index.metric_type != faiss.METRIC_L2:
            return None
        if int(rows.starts[-1]) > np.iinfo(np.int32).max:
            return None
        return InvertedLists(index, rows)

    def shared(self, queries: int, probes: int) -> float:
        """Return how many of so many queries look into a list, on average."""
        return queries * min(probes, self.count) / self.count

    def assign(self, keys_ND: Tensor, queries: Floats, probes: int) -> QueryAssignment:
        """Return the lists nearest to each query."""
        chain: Any = self._index.chain if isinstance(self._index, faiss.IndexPreTransform) else None
        for number in range(0 if chain is None else chain.size()):
            queries = chain.at(number).apply(queries)
        lists_NP = self._ivf.quantizer.search(np.ascontiguousarray(queries), min(probes, self.count))[1]
        return QueryAssignment(keys_ND, queries, lists_NP)

    def search(
        self,
        asked: QueryAssignment,
        k: int,
        barred: tuple[Numbers, Numbers] | None = None,
        open_P: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Numbers, Floats]:
        """Return the k nearest positions of each query in its lists, and minus their squared distances, [N, k].

        `barred` bounds the positions, low..high, that each query may not find; `open_P` says which positions all may.
        """
        positions = np.empty((len(asked), k), np.int64)
        scores = np.empty((len(asked), k), np.float32)
        with SPACE.lock:
            step = NearestRows.at_once(k, PIECE)
            for first in range(0, len(asked), step):
                some = slice(first, first + step)
                bounds = None if barred is None else (barred[0][some], barred[1][some])
                nearest = NearestRows(len(positions[some]), k, PIECE, bounds)
                self._compare(asked.queries[some], asked.lists_NP[some], open_P, nearest)
                nearest.fill(positions[some], scores[some])
        return positions, scores

    def _compare(
        self, queries: Floats, lists_NP: Numbers, open_P: npt.NDArray[np.bool_] | None, nearest: NearestRows
    ) -> None:
        """Compare queries with the rows of their lists, list by list; a graph of clusters may find too few: -1."""
        lists = lists_NP.ravel()
        order = np.argsort(lists, kind="stable")
        first = np.flatnonzero(np.diff(lists[order], prepend=-1))
        lines = order // max(1, lists_NP.shape[1])
        queries_ND = torch.from_numpy(queries)[:, self._codes.order_D]
        for low, high in itertools.pairwise([*first.tolist(), len(order)]):
            number = int(lists[order[low]])
            lines_n = lines[low:high]
            near_nD = queries_ND[torch.from_numpy(lines_n)] - self._anchors[number]
            squares_n1 = near_nD.square().sum(1, keepdim=True)
            for begin in range(0, int(self._sizes[number]), PIECE):
                rows = min(PIECE, int(self._sizes[number]) - begin)
                at = int(self._begins[number]) + begin
                positions_R = self._positions[at : at + rows]
                distances_nR = self._products(near_nD, number, begin, rows).add_(squares_n1).clamp_(min=0).numpy()
                if open_P is not None:
                    distances_nR[:, ~open_P[positions_R]] = np.inf
                nearest.add(lines_n, distances_nR, positions_R)

    def _products(self, near_nD: Tensor, number: int, begin: int, rows: int) -> Tensor:
        """|x|^2 - 2 q.x of queries and some rows of a list, both taken from the list's anchor, to round less."""
        rows_RD = torch.from_numpy(SPACE.of("decoded", rows * near_nD.shape[1])).view(rows, -1)
        self._codes.decode(number, begin, rows_RD)
        squares_R = torch.from_numpy(np.einsum("rd,rd->r", rows_RD.numpy(), rows_RD.numpy()))
        out_nR = torch.from_numpy(SPACE.of("distances", rows * len(near_nD))).view(-1, rows)
        return torch.addmm(squares_R, near_nD, rows_RD.T, alpha=-2, out=out_nR)


class _Codes:
    """The codes of inverted lists, decoded by FAISS."""

    def __init__(self, ivf: Any) -> None:
        self._ivf = ivf
        self.order_D = torch.arange(ivf.d)  # in which order a row's values are decoded

    def anchors(self, centroids_CD: Tensor) -> Tensor:
        """Return the point from which the rows of each list are measured."""
        self._centroids = centroids_CD
        return centroids_CD

    def decode(self, number: int, begin: int, out_RD: Tensor) -> None:
        """Fill in the rows of a list from one on, minus the list's anchor."""
        codes = self._bytes(number, begin, len(out_RD))
        lists = np.full(len(out_RD), number, np.int64)
        given = (faiss.swig_ptr(array) for array in (codes, lists, out_RD.numpy()))
        self._ivf.decode_vectors(len(out_RD), *given)
        out_RD.sub_(self._centroids[number])

    def _bytes(self, number: int, begin: int, rows: int) -> npt.NDArray[Any]:
        size = self._ivf.code_size
        return _viewed(self._ivf.invlists.get_codes(number), (begin + rows) * size)[begin * size :].reshape(rows, size)


class _Halves(_Codes):
    """Values in half precision."""

    def decode(self, number: int, begin: int, out_RD: Tensor) -> None:
        out_RD.copy_(torch.from_numpy(self._bytes(number, begin, len(out_RD)).view(np.float16)))
        if not self._ivf.by_residual:
            out_RD.sub_(self._centroids[number])


class _Levels(_Codes):
    """Values of 4 or 8 bits, each a number of steps: FAISS decodes one by one, here it is done for all at once.

    Of 4 bits, a byte has two values. All that stand first are decoded first.
    """

    def __init__(self, ivf: Any, bits: int) -> None:
        super().__init__(ivf)
        self._bits = bits
        if bits == 4:
            self.order_D = torch.cat([self.order_D[::2], self.order_D[1::2]])
        none, all_ = (ivf.sq.decode(np.full((1, ivf.code_size), byte, np.uint8)) for byte in (0, 255))
        self._lowest_D = torch.from_numpy(none[0])[self.order_D]
        self._step_D = torch.from_numpy((all_ - none)[0])[self.order_D] / (2**bits - 1)

    def anchors(self, centroids_CD: Tensor) -> Tensor:
        """Return the vector of a code of zeros, from which all steps go."""
        if not self._ivf.by_residual:
            return self._lowest_D.expand(centroids_CD.shape)
        return centroids_CD[:, self.order_D] + self._lowest_D

    def decode(self, number: int, begin: int, out_RD: Tensor) -> None:
        codes = self._bytes(number, begin, len(out_RD))
        out = out_RD.numpy()
        if self._bits == 8:
            out[:] = codes
        else:
            half = codes.shape[1]
            out[:, :half], out[:, half:] = codes & 15, codes >> 4
        out_RD.mul_(self._step_D)


def _codes_of(ivf: Any) -> _Codes:
    kinds = faiss.ScalarQuantizer
    if not isinstance(ivf, faiss.IndexIVFScalarQuantizer):
        return _Codes(ivf)
    if ivf.sq.qtype == kinds.QT_fp16:
        return _Halves(ivf)
    bits = {kinds.QT_8bit: 8, kinds.QT_4bit: 4}.get(ivf.sq.qtype)
    return _Codes(ivf) if bits is None or ivf.d * bits % 8 else _Levels(ivf, bits)


def _inverted(index: Any) -> Any:
    return faiss.downcast_index(faiss.extract_index_ivf(index))


def _viewed(pointer: Any, length: int) -> npt.NDArray[Any]:
    """Return an array over memory that belongs to FAISS."""
    return faiss.rev_swig_ptr(pointer, length) if length else np.empty(0, np.uint8)


def _centroids(ivf: Any) -> Floats:
    found: Floats = ivf.quantizer.reconstruct_n(0, ivf.nlist)
    return found
