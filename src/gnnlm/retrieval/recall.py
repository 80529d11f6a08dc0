"""How many of the true nearest rows an index finds, against exact search.

    recall@k = found rows that are as near as the k-th nearest, of the first k found, divided by k

Rows that are exactly as near as the k-th nearest count as found whichever of them the index returned: all documents
share the state of their first token, so there are always some.

Shapes: N queries, K neighbours, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gnnlm.retrieval.index import Index
from gnnlm.retrieval.neighbours import Neighbours

RECALL_KS = (1, 10, 128, 1024)
ROUNDING = 1e-6  # similarities that differ by less, relative to 1 or to their size, are equal


def recall_ks(k: int) -> list[int]:
    """The numbers of neighbours to look at where k are searched for.

    >>> recall_ks(1024), recall_ks(16)
    ([1, 10, 128, 1024], [1, 10, 16])
    """
    return [at for at in RECALL_KS if at < k] + [k]


def recall_of(found: Neighbours, keys_ND: Tensor, exact: Index, ks: Sequence[int]) -> dict[int, float]:
    """Recall at each of some k, averaged over queries, of what an index found for their keys, nearest first, [N, K].

    `exact` indexes the same rows. Missing neighbours (-1) are not found; where there are fewer than k rows, all of
    them are wanted.
    """
    true_NK = exact.search(keys_ND, max(ks)).similarity
    recalls = {}
    for k in ks:
        wanted = min(k, len(exact))
        near = exact.compare(
            keys_ND, found.positions[:, :k].contiguous(), k
        )  # similarities anew: the index's may be approximate
        last_N1 = true_NK[:, wanted - 1 : wanted]
        reaches_Nk = near.similarity >= last_N1 - ROUNDING * last_N1.abs().clamp(min=1.0)
        recalls[k] = float((reaches_Nk & (near.positions >= 0)).sum(1).clamp(max=wanted).double().mean() / wanted)
    return recalls
