"""Exact search: one matrix product and a top-k, in torch.

The result of a query must not depend on its batch, but matrix products of different shapes round differently. So the
product only selects candidates, with a margin for its rounding. Their similarities are then recomputed, one row at a
time, and sorted by (similarity, position).

Shapes: N queries, R rows, D width, C candidates.
"""

from __future__ import annotations

import math
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.datastore.store import mapped
from gnnlm.matmul import few_rows, product
from gnnlm.retrieval.index import Allowed, as_keys
from gnnlm.retrieval.neighbours import Neighbours

SCORES_AT_ONCE = 2**24  # scores held at once: 64 MB of float32
GATHERED_AT_ONCE = 2**21  # candidates' values held at once: 8 MB of float32 stay in the processor's cache
SPARE = 16  # candidates beyond k, so that a second top-k is rarely needed


class ExactIndex:
    """All keys in memory, compared with every query."""

    def __init__(self, keys_RD: Tensor, positions_R: Tensor, metric: str) -> None:
        """`keys_RD` come from `as_keys`; `positions_R` are sorted."""
        self.keys_RD = keys_RD
        self.positions_R = positions_R
        self.metric = metric
        self._square_R = keys_RD.square().sum(1) if metric == "l2" else None
        largest = 1.0
        if self._square_R is not None and len(keys_RD):
            largest = float(self._square_R.max())
        self._rounding = 2.0**-23 * math.sqrt(keys_RD.shape[1]) * 4 * max(1.0, largest)

    @classmethod
    def over(cls, keys: npt.NDArray[Any], positions_R: Tensor, metric: str, device: str = "cpu") -> ExactIndex:
        """Return an index over some positions of stored keys."""
        return cls(as_keys(mapped(keys)[positions_R].to(device), metric), positions_R.to(device), metric)

    def __len__(self) -> int:
        return len(self.positions_R)

    def search(self, keys_ND: Tensor, k: int, allowed: Allowed | None = None) -> Neighbours:
        """See `Index.search`."""
        queries_ND = as_keys(keys_ND.to(self.keys_RD.device), self.metric)
        k = min(k, len(self))
        if not len(queries_ND) or not k:
            return Neighbours.none(len(queries_ND), k=k)
        open_R = None
        if allowed is not None and allowed.positions is not None:
            open_R = allowed.positions.to(self.keys_RD.device)[self.positions_R]
        chunk = min(len(queries_ND), max(1, SCORES_AT_ONCE // len(self)))
        scores_cR = self.keys_RD.new_empty(chunk, len(self))  # one buffer: fresh pages for each chunk take time
        found = []
        for start in range(0, len(queries_ND), chunk):
            part = slice(start, start + chunk)
            barred = None if allowed is None or allowed.barred is None else [end[part] for end in allowed.barred]
            found.append(self._search(queries_ND[part], self._scores(queries_ND[part], scores_cR), k, open_R, barred))
        return Neighbours(torch.cat([f.positions for f in found]), torch.cat([f.similarity for f in found]))

    def compare(self, keys_ND: Tensor, positions_NC: Tensor, k: int) -> Neighbours:
        """See `Index.compare`."""
        return sorted_neighbours(positions_NC.to(self.positions_R), self.similarity(keys_ND, positions_NC), k)

    def similarity(self, keys_ND: Tensor, positions_NC: Tensor) -> Tensor:
        """See `Index.similarity`."""
        rows_NC = torch.searchsorted(self.positions_R, positions_NC.to(self.positions_R))
        return self._similarity(as_keys(keys_ND.to(self.keys_RD.device), self.metric), rows_NC)

    def _scores(self, queries_nD: Tensor, scores_cR: Tensor) -> Tensor:
        """Return the products of queries and keys, [n, R]; of many queries, in the buffer."""
        if few_rows(queries_nD, self.keys_RD):
            return product(queries_nD, self.keys_RD)
        return torch.mm(queries_nD, self.keys_RD.T, out=scores_cR[: len(queries_nD)])

    def _search(
        self, queries_nD: Tensor, scores_nR: Tensor, k: int, open_R: Tensor | None, barred: list[Tensor] | None
    ) -> Neighbours:
        """Return the k nearest, given the products of queries and keys, which are overwritten."""
        if self._square_R is not None:  # 2 q.x - |x|^2 ranks as minus the squared distance does
            scores_nR = scores_nR.mul_(2).sub_(self._square_R)
        if open_R is not None:
            scores_nR.masked_fill_(~open_R, -math.inf)
        if barred is not None:
            low = torch.searchsorted(self.positions_R, barred[0].to(self.positions_R)).tolist()
            high = torch.searchsorted(self.positions_R, barred[1].to(self.positions_R), right=True).tolist()
            for line, (first, end) in enumerate(zip(low, high, strict=True)):
                scores_nR[line, first:end] = -math.inf
        margin = self._rounding * (1.0 if self._square_R is None else 1.0 + float(queries_nD.square().sum(1).max()))
        found = Neighbours.none(len(queries_nD), k=k).to(queries_nD.device)
        lines = torch.arange(len(queries_nD), device=queries_nD.device)
        count = min(len(self), k + SPARE)
        while len(lines):  # all queries; then those whose k-th place is shared by more rows than were looked at
            values_nC, rows_nC = largest(scores_nR if len(lines) == len(scores_nR) else scores_nR[lines], count)
            last_n = values_nC[:, -1]
            whole_n = (last_n < values_nC[:, k - 1] - margin) | torch.isneginf(last_n) | (count == len(self))
            near = self._nearest(queries_nD[lines[whole_n]], values_nC[whole_n], rows_nC[whole_n], k)
            found.positions[lines[whole_n]], found.similarity[lines[whole_n]] = near.positions, near.similarity
            lines = lines[~whole_n]
            count = min(len(self), 4 * count)
        return found

    def _nearest(self, queries_nD: Tensor, values_nC: Tensor, rows_nC: Tensor, k: int) -> Neighbours:
        """Return the k nearest of candidates, by similarities computed from the keys."""
        barred_nC = torch.isneginf(values_nC)
        similarity_nC = self._similarity(queries_nD, rows_nC).masked_fill_(barred_nC, -math.inf)
        return sorted_neighbours(self.positions_R[rows_nC].masked_fill_(barred_nC, -1), similarity_nC, k)

    def _similarity(self, queries_nD: Tensor, rows_nC: Tensor) -> Tensor:
        """Return the similarity of each query with its candidates, each computed separately."""
        count = rows_nC.shape[1]
        width = self.keys_RD.shape[1]
        out_nC = torch.empty(rows_nC.shape, device=rows_nC.device)
        step = max(1, GATHERED_AT_ONCE // (count * width))
        for start in range(0, len(rows_nC), step):
            part = slice(start, start + step)
            found_mCD = self.keys_RD.index_select(0, rows_nC[part].reshape(-1)).view(-1, count, width)
            queries_m1D = queries_nD[part, None]
            if self.metric == "l2":
                out_nC[part] = (found_mCD - queries_m1D).square_().sum(-1).neg_()
            else:
                out_nC[part] = found_mCD.mul_(queries_m1D).sum(-1)
        return out_nC


def largest(scores_nR: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each line and where they are, largest first.

    They are all in the blocks of columns with the largest maxima, as many blocks as values are wanted. Looking for the
    blocks first leaves far less to sort.

    >>> [part.tolist() for part in largest(torch.tensor([[3.0, 9.0, 5.0]]), 2)]
    [[[9.0, 5.0]], [[1, 2]]]
    """
    lines, columns = scores_nR.shape
    block = int(math.sqrt(columns / max(1, count)))  # about as many blocks to choose from as values in those chosen
    if block < 3:
        best = scores_nR.topk(count, dim=1)
        return best.values, best.indices
    whole = columns // block * block
    blocks_nbB = scores_nR[:, :whole].unflatten(1, (-1, block))
    chosen_nc = blocks_nbB.amax(-1).topk(count, dim=1, sorted=False).indices
    inside_ncB = chosen_nc[..., None] * block + torch.arange(block, device=scores_nR.device)
    rest_r = torch.arange(whole, columns, device=scores_nR.device).expand(lines, -1)
    columns_nC = torch.cat([inside_ncB.flatten(1), rest_r], dim=1)
    best = scores_nR.gather(1, columns_nC).topk(count, dim=1)
    return best.values, columns_nC.gather(1, best.indices)


def sorted_neighbours(positions_NC: Tensor, similarity_NC: Tensor, k: int) -> Neighbours:
    """Return the k nearest of some candidates, by (similarity, position).

    >>> found = sorted_neighbours(torch.tensor([[7, 3, -1]]), torch.tensor([[0.5, 0.5, -math.inf]]), 2)
    >>> found.positions.tolist()
    [[3, 7]]
    """
    last = torch.iinfo(torch.long).max
    order_NC = positions_NC.masked_fill(positions_NC < 0, last).argsort(dim=1, stable=True)
    by_similarity = similarity_NC.gather(1, order_NC).argsort(dim=1, descending=True, stable=True)[:, :k]
    order_Nk = order_NC.gather(1, by_similarity)
    return Neighbours(positions_NC.gather(1, order_Nk), similarity_NC.gather(1, order_Nk))
