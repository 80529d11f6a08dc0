"""Approximate search with FAISS: inverted lists, product quantization, or any factory string.

Inverted lists are searched list by list, all queries of a batch at once (`lists.py`). A few queries share no lists,
so FAISS scans those of each: it finds the same rows, ties by position. Any other index is asked as FAISS does it. Its
scores may come from tables of 8 bits (fast-scan, RaBitQ): such an index only proposes candidates, and their
similarities are computed from the keys.

Filters are applied inside the search: exact search among the remaining rows if the filter is narrow. A query that a
filter leaves with too few neighbours searches more lists, and finally all of them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Array
from gnnlm.retrieval.exact import ExactIndex, sorted_neighbours
from gnnlm.retrieval.index import Allowed, Rows, as_keys
from gnnlm.retrieval.ivf_scan import InvertedLists, QueryAssignment
from gnnlm.retrieval.neighbours import Neighbours

Floats = npt.NDArray[np.float32]
NARROW = 16_384  # a filter that leaves fewer rows than this is searched exactly
FETCH_AT_ONCE = 2**26  # rows asked of the index in one call, over all queries: 0.8 GB
COMPARED_AT_ONCE = 2**17  # candidates whose keys are read in one call, over all queries
WORTH = 8  # queries that look into a list, from which on it is worth decoding for them
SPARE = 16  # rows beyond those asked for: they show whether the last is tied with others
PROPOSED = 1.25  # candidates for each neighbour, where the index only proposes them


class FaissIndex:
    """A FAISS index, which positions its rows have, and the keys it was made from."""

    def __init__(self, index: Any, keys: Array, rows: Rows, metric: str, by_lists: bool = True) -> None:
        """`by_lists`: search list by list what can be; otherwise FAISS scans the lists of each query."""
        self._index = index
        self._keys = keys
        self._rows = rows
        self.metric = metric
        self._ivf = faiss.try_extract_index_ivf(index)
        self._lists = InvertedLists.of(index, rows) if by_lists else None
        self._proposes = self._lists is None and _has_coarse_scores(index)

    def __len__(self) -> int:
        return len(self._rows)

    def assign(self, keys_ND: Tensor) -> Tensor | QueryAssignment:
        """Assign queries to the lists that each looks into, for this index and for other copies of it."""
        return keys_ND if self._by_list(len(keys_ND)) is None else self._assigned(keys_ND, self.probes)

    def search(self, keys_ND: Tensor | QueryAssignment, k: int, allowed: Allowed | None = None) -> Neighbours:
        """See `Index.search`; the search is approximate."""
        k = min(k, len(self))
        if not len(keys_ND) or not k:
            return Neighbours.none(len(keys_ND), k=k)
        allowed = allowed or Allowed()
        if allowed.positions is not None:
            open_R = self._rows.open(allowed.positions)
            if int(open_R.sum()) <= NARROW:
                positions = self._rows.positions(torch.nonzero(open_R)[:, 0])
                few = ExactIndex.over(self._keys, positions, self.metric)
                return few.search(_keys(keys_ND), k, Allowed(allowed.barred)).padded(k)
        lists = self._by_list(len(keys_ND))
        if lists is None:
            return self._ask_faiss(_keys(keys_ND), k, allowed)
        asked = keys_ND if isinstance(keys_ND, QueryAssignment) else self._assigned(keys_ND, self.probes)
        return self._search_lists(lists, asked, k, allowed)

    def compare(self, keys_ND: Tensor, positions_NC: Tensor, k: int) -> Neighbours:
        """See `Index.compare`."""
        return sorted_neighbours(positions_NC, self.similarity(keys_ND, positions_NC), k)

    def similarity(self, keys_ND: Tensor, positions_NC: Tensor) -> Tensor:
        """See `Index.similarity`."""
        out_NC = torch.full(positions_NC.shape, -math.inf)
        for part in torch.arange(len(keys_ND)).split(max(1, COMPARED_AT_ONCE // max(1, positions_NC.shape[1]))):
            real_nC = positions_NC[part] >= 0
            if bool(real_nC.any()):
                few = ExactIndex.over(self._keys, positions_NC[part][real_nC].unique(), self.metric)
                known_nC = positions_NC[part].where(real_nC, few.positions_R[0])
                out_NC[part] = few.similarity(keys_ND[part], known_nC).masked_fill(~real_nC, -math.inf)
        return out_NC

    def _by_list(self, queries: int) -> InvertedLists | None:
        """Return the lists if so many queries are searched list by list, else None."""
        worth = self._lists is not None and self._lists.shared(queries, self.probes) >= WORTH
        return self._lists if worth else None

    # -- list by list ----------------------------------------------------------------------------------------------

    def _assigned(self, keys_ND: Tensor, probes: int) -> QueryAssignment:
        assert self._lists is not None
        return self._lists.assign(keys_ND, self._queries(keys_ND), probes)

    def _search_lists(self, lists: InvertedLists, asked: QueryAssignment, k: int, allowed: Allowed) -> Neighbours:
        """Search, and look into more lists for the queries that a filter has left with too few neighbours."""
        open_P = None if allowed.positions is None else allowed.positions.numpy()
        barred = None if allowed.barred is None else tuple(end.numpy() for end in allowed.barred)
        positions, scores = lists.search(asked, k, barred, open_P)  # type: ignore[arg-type]  # two ends
        probes = asked.lists_NP.shape[1]
        while open_P is not None and probes < lists.count:
            short = np.flatnonzero(positions[:, -1] < 0)
            if not len(short):
                break
            probes = min(4 * probes, lists.count)
            more = self._assigned(asked.keys_ND[torch.from_numpy(short)], probes)
            bounds = None if barred is None else (barred[0][short], barred[1][short])
            positions[short], scores[short] = lists.search(more, k, bounds, open_P)
        return Neighbours(torch.from_numpy(positions), self._as_similarity(torch.from_numpy(scores)))

    def _as_similarity(self, scores: Tensor) -> Tensor:
        """Convert minus the squared distance to a similarity; between unit vectors the score is 2 cos - 2."""
        scores = scores.clamp(max=0.0)
        return 1 + scores / 2 if self.metric == "cosine" else scores

    # -- as FAISS does it ------------------------------------------------------------------------------------------

    def _ask_faiss(self, keys_ND: Tensor, k: int, allowed: Allowed) -> Neighbours:
        """Fetch, filter, and fetch more for the queries that have too few left."""
        queries = self._queries(keys_ND)
        barred = allowed.barred
        open_R = None if allowed.positions is None else self._rows.open(allowed.positions).numpy()
        found = Neighbours.none(len(queries), k=k)
        closed = torch.zeros(len(queries), dtype=torch.long) if barred is None else barred[1] - barred[0] + 1
        enough = (k + closed).clamp(max=len(self))
        lines = torch.arange(len(queries))
        probes = self.probes
        fetch = k if barred is None else min(2 * k, len(self))
        fetch = min(int(PROPOSED * fetch), len(self)) if self._proposes else fetch
        while len(lines):
            for part in lines.split(max(1, FETCH_AT_ONCE // fetch)):
                got = self._fetched(queries[part.numpy()], fetch, open_R, probes)
                if barred is not None:
                    low, high = (end[part, None] for end in barred)
                    inside = (got.positions >= low) & (got.positions <= high)
                    got = Neighbours(
                        got.positions.masked_fill(inside, -1), got.similarity.masked_fill(inside, -math.inf)
                    )
                if self._proposes:
                    got = self.compare(keys_ND[part], got.positions, k)
                sorted_ = self._lists is not None and barred is None
                best = got if sorted_ else sorted_neighbours(got.positions, got.similarity, k)
                found.positions[part], found.similarity[part] = best.positions, best.similarity
            short = found.positions[lines, -1] < 0
            if open_R is not None and probes < self._count:  # the filter left too few rows in the searched lists
                lines = lines[short]
                probes = min(4 * probes, self._count)
            else:
                lines = lines[short & (fetch < enough[lines])]
            fetch = fetch if barred is None else min(4 * fetch, len(self))
        return found

    def _fetched(self, queries: Floats, fetch: int, open_R: npt.NDArray[np.bool_] | None, probes: int) -> Neighbours:
        """Search the index; among ties of inverted lists, the lowest positions are kept."""
        if self._lists is None:
            return self._found(queries, fetch, open_R, probes)
        nearest = Neighbours.none(len(queries), k=fetch)
        lines = torch.arange(len(queries))
        count = fetch + SPARE
        while len(lines):
            count = min(count, len(self))
            found = self._found(queries[lines.numpy()], count, open_R, probes)
            best = sorted_neighbours(found.positions, found.similarity, fetch)
            nearest.positions[lines], nearest.similarity[lines] = best.positions, best.similarity
            tied = (found.similarity[:, -1] == best.similarity[:, -1]) & (found.positions[:, -1] >= 0)
            lines = lines[tied & (count < len(self))]
            count *= 4
        return nearest

    def _found(self, queries: Floats, fetch: int, open_R: npt.NDArray[np.bool_] | None, probes: int) -> Neighbours:
        scores, rows = self._index.search(queries, fetch, params=self._parameters(open_R, probes))
        missing = rows < 0
        if self._index.metric_type == faiss.METRIC_L2:  # FAISS gives squared distances; between unit vectors 2 - 2 cos
            scores = 1 - scores / 2 if self.metric == "cosine" else -scores
        positions = self._rows.positions(torch.from_numpy(np.maximum(rows, 0))).numpy()
        return Neighbours(
            torch.from_numpy(np.where(missing, -1, positions)),
            torch.from_numpy(np.where(missing, -np.inf, scores).astype(np.float32)),
        )

    def _parameters(self, open_R: npt.NDArray[np.bool_] | None, probes: int) -> Any:
        if open_R is None and probes == self.probes:
            return None
        library: Any = faiss  # its stubs lack the keyword arguments of search parameters
        selector = None if open_R is None else library.IDSelectorBitmap(np.packbits(open_R, bitorder="little"))
        if self._ivf is None:
            return library.SearchParameters(sel=selector)
        inner = library.SearchParametersIVF(sel=selector, nprobe=probes)
        chain = isinstance(self._index, faiss.IndexPreTransform)
        return library.SearchParametersPreTransform(index_params=inner) if chain else inner

    def _queries(self, keys_ND: Tensor) -> Floats:
        made: Floats = np.ascontiguousarray(as_keys(keys_ND, self.metric).numpy())
        return made

    @property
    def probes(self) -> int:
        """How many lists a query looks into."""
        return 1 if self._ivf is None else int(self._ivf.nprobe)

    @property
    def _count(self) -> int:
        return 1 if self._ivf is None else int(self._ivf.nlist)


def open_faiss_index(
    path: Path, keys: Array, rows: Rows, metric: str, probes: int, by_lists: bool = True
) -> FaissIndex:
    index = faiss.read_index(str(path))
    ivf: Any = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf = faiss.downcast_index(ivf)
        ivf.nprobe = min(probes, ivf.nlist)
        quantizer = faiss.downcast_index(ivf.quantizer)
        if isinstance(quantizer, faiss.IndexHNSW):  # clusters are found through a graph: examine more than are needed
            quantizer.hnsw.efSearch = max(quantizer.hnsw.efSearch, 2 * ivf.nprobe)
        if by_lists and type(ivf) is faiss.IndexIVFPQ:
            ivf.use_precomputed_table = -1  # FAISS's own scan alone would read these tables
            ivf.precompute_table()
    return FaissIndex(index, keys, rows, metric, by_lists)


def _keys(asked: Tensor | QueryAssignment) -> Tensor:
    return asked.keys_ND if isinstance(asked, QueryAssignment) else asked


def _has_coarse_scores(index: Any) -> bool:
    """Return whether an index, or one inside it, scores with a few bits."""
    inner = [index, faiss.try_extract_index_ivf(index)]
    if isinstance(index, faiss.IndexPreTransform):
        inner.append(faiss.downcast_index(index.index))
    names = [type(faiss.downcast_index(each)).__name__ for each in inner if each is not None]
    return any("FastScan" in name or "RaBitQ" in name for name in names)
