"""The interface of an index, and how the configured kind is built and opened.

A key is the state (or the last feed-forward's input), scaled to unit length under cosine. Rows without a token (the
position past a document's last) are not indexed: there is nothing to copy from them.

Exact search is `exact.py`; everything approximate is FAISS, in `faiss_index.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import IndexConfig
from gnnlm.corpus.stream import END, Stream
from gnnlm.progress import say
from gnnlm.retrieval.neighbours import Neighbours

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Allowed:
    """Which store positions the queries of a search may find.

    `barred` is a range low..high (both included) for each query that it may not find, [N] each; `positions` says for
    every position of the store whether queries may find it, [P].
    """

    barred: tuple[Tensor, Tensor] | None = None
    positions: Tensor | None = None


class Index(Protocol):
    """Finds the positions whose keys are nearest."""

    metric: str

    def __len__(self) -> int:
        """How many rows can be found."""
        ...

    def search(self, keys_ND: Tensor, k: int, allowed: Allowed | None = None) -> Neighbours:
        """The k nearest allowed positions of each query, [N, k], nearest first, ties by position.

        Similarity is the cosine, or minus the squared distance. If fewer are allowed, the remaining entries are -1 and
        minus infinity.
        """
        ...

    def compare(self, keys_ND: Tensor, positions_NC: Tensor, k: int) -> Neighbours:
        """The k nearest of some indexed positions of each query, by similarities computed from the keys."""
        ...


def as_keys(states: Tensor, metric: str) -> Tensor:
    """States as float32 keys; unit length under cosine.

    >>> as_keys(torch.tensor([[3.0, 4.0]]), "cosine")
    tensor([[0.6000, 0.8000]])
    """
    keys = states.float()
    if metric == "cosine":
        keys = keys / keys.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return keys


def keys_of(store: Artifact, split: str) -> npt.NDArray[Any]:
    """The search keys of a split: its states, or the keys stored with them."""
    return store.array(f"{split}.{'states' if store.facts.get('key', 'state') == 'state' else 'keys'}.npy")


def build_index(draft: Draft, store: Artifact, stream: Stream, config: IndexConfig, seed: int) -> Artifact:
    """Index the train split of a store. Exact search needs no file of its own: it reads the store's keys."""
    keys = keys_of(store, "train")
    positions = np.flatnonzero(np.asarray(stream.tokens) != END).astype(np.int64)
    draft.save("positions.npy", positions)
    if config.kind == "exact":
        say(f"index: exact search over {len(positions):,} rows")
    else:
        from gnnlm.retrieval.faiss_index import write_faiss_index

        write_faiss_index(draft, keys, positions, config, seed)
    return draft.finish({"rows": len(positions), "metric": config.metric, "kind": config.kind})


def open_index(artifact: Artifact, store: Artifact, probes: int, device: str = "cpu") -> Index:
    """The index of a run over the keys of its store."""
    positions = torch.from_numpy(np.array(artifact.array("positions.npy")))
    keys, metric = keys_of(store, "train"), artifact.facts["metric"]
    if artifact.facts["kind"] == "exact":
        from gnnlm.retrieval.exact import ExactIndex

        return ExactIndex.over(keys, positions, metric, device)
    from gnnlm.retrieval.faiss_index import open_faiss_index

    return open_faiss_index(artifact.file("index.faiss"), keys, positions, metric, probes)
