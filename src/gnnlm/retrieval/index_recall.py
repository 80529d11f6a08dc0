"""How many of the true nearest rows an index finds, against exact search.

    recall@k = found rows that are as near as the k-th nearest, of the first k found, divided by k

Rows that are exactly as near as the k-th nearest count as found whichever of them the index returned: all documents
share the state of their first token, so there are always some.

Shapes: N queries, K neighbours, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Array, Artifact
from gnnlm.datastore.store import read_rows
from gnnlm.progress import Track
from gnnlm.retrieval.exact import ExactIndex, sorted_neighbours
from gnnlm.retrieval.index import Index, Rows, SomeRows, as_keys, keys_of
from gnnlm.retrieval.neighbours import Neighbours

RECALL_KS = (1, 10, 128, 1024)
CHECKED = 64  # valid positions on which a new index is compared with exact search
ROWS_AT_ONCE = 65_536  # stored keys that are compared in one piece
ROUNDING = 1e-6  # similarities that differ by less, relative to 1 or to their size, are equal


def recall_ks(k: int) -> list[int]:
    """Return the numbers of neighbours to look at where k are searched for.

    >>> recall_ks(1024), recall_ks(16)
    ([1, 10, 128, 1024], [1, 10, 16])
    """
    return [at for at in RECALL_KS if at < k] + [k]


def recall_of(found: Neighbours, keys_ND: Tensor, exact: Index, ks: Sequence[int]) -> dict[int, float]:
    """Return the mean recall at each of some k of what an index found for the keys, nearest first, [N, K].

    `exact` indexes the same rows. Missing neighbours (-1) are not found; where there are fewer than k rows, all of
    them are wanted.
    """
    return recall_from(found, keys_ND, exact, exact.search(keys_ND, max(ks)).similarity, ks)


def recall_of_index(
    index: Index, keys_ND: Tensor, stored: Array, rows: Rows | SomeRows, ks: Sequence[int]
) -> dict[int, float]:
    """Return the recall of an index over `stored` keys, which are read once, in pieces, to save memory."""
    k = min(max(ks), len(rows))
    true_NK = nearest(keys_ND, stored, rows, k, index.metric).similarity
    return recall_from(index.search(keys_ND, k), keys_ND, index, true_NK, ks)


def checked_keys(encoded: Artifact, seed: int) -> Tensor:
    """Return the keys of the valid positions on which an index is compared with exact search."""
    valid = keys_of(encoded, "valid")
    drawn = np.sort(np.random.default_rng(seed).permutation(len(valid))[:CHECKED])
    return read_rows(valid, torch.from_numpy(drawn))


def checked_recall(index: Index, encoded: Artifact, rows: Rows | SomeRows, keys_ND: Tensor) -> dict[str, float]:
    """Return the recall of an index for these keys against exact search of its rows, by k, as it is recorded."""
    found = recall_of_index(index, keys_ND, keys_of(encoded, "train"), rows, RECALL_KS)
    return {str(k): recall for k, recall in found.items()}


def nearest(
    keys_ND: Tensor, stored: Array, rows: Rows | SomeRows, k: int, metric: str, label: str = "exact search"
) -> Neighbours:
    """Return the k nearest of all rows by exact search, reading a piece of the keys at a time."""
    best = Neighbours.none(len(keys_ND), k=k)
    with Track(label, len(rows), "rows", brief=True) as track:
        for some in torch.arange(len(rows)).split(ROWS_AT_ONCE):
            positions_R = rows.positions(some)
            exact = ExactIndex(as_keys(read_rows(stored, positions_R), metric), positions_R, metric)
            found = exact.search(keys_ND, k)
            positions_NC = torch.cat([best.positions, found.positions], dim=1)
            best = sorted_neighbours(positions_NC, torch.cat([best.similarity, found.similarity], dim=1), k)
            track.advance(len(some))
    return best


def recall_from(
    found: Neighbours, keys_ND: Tensor, index: Index, true_NK: Tensor, ks: Sequence[int]
) -> dict[int, float]:
    """Return the recall, given the true similarities; those of the found rows are computed from the keys."""
    recalls = {}
    for k in ks:
        wanted = min(k, len(index))
        near = index.compare(keys_ND, found.positions[:, :k].contiguous(), k)
        last_N1 = true_NK[:, wanted - 1 : wanted]
        reaches_Nk = near.similarity >= last_N1 - ROUNDING * last_N1.abs().clamp(min=1.0)
        recalls[k] = float((reaches_Nk & (near.positions >= 0)).sum(1).clamp(max=wanted).double().mean() / wanted)
    return recalls
