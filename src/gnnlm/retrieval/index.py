"""The interface of an index, and how the configured kind is built and opened.

A key is the state (or the last feed-forward's input), scaled to unit length under cosine. Rows without a token (the
position past a document's last) are not indexed: there is nothing to copy from them.

Every segment of the store is searched by itself, and the results are merged (`segmented.py`). Exact search is
`exact.py`; everything approximate is FAISS, in `faiss_index.py`. What `index.kind` stands for is in `choice.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Array, Artifact, Draft, files_of, joined
from gnnlm.config import IndexConfig
from gnnlm.corpus.stream import Stream, TokenStream
from gnnlm.datastore.store import read_rows
from gnnlm.engine import Spread, here
from gnnlm.progress import say
from gnnlm.retrieval.auto_index import choose_index
from gnnlm.retrieval.neighbours import Neighbours

if TYPE_CHECKING:
    from gnnlm.retrieval.segmented import SegmentedIndex

Ids = npt.NDArray[np.int64]
CHECKED, CHECKED_KS = 64, (1, 10, 128, 1024)  # valid positions on which a new index is compared with exact search


@dataclass(frozen=True)
class Rows:
    """The rows of an index: all positions that have a token, which are all but the last of each document.

    `starts` is where each document begins, and the end, [documents + 1]; so a row's position takes no memory.

    >>> rows = Rows(torch.tensor([0, 3, 5]))
    >>> len(rows), rows.positions(torch.tensor([0, 1, 2])).tolist(), rows.all().tolist()
    (3, [0, 1, 3], [0, 1, 3])
    """

    starts: Tensor

    @classmethod
    def of(cls, stream: TokenStream) -> Rows:
        return cls(torch.from_numpy(np.array(stream.starts)))

    def __len__(self) -> int:
        return int(self.starts[-1]) - (len(self.starts) - 1)

    @cached_property
    def _first_rows(self) -> Tensor:
        return self.starts[:-1] - torch.arange(len(self.starts) - 1)

    def positions(self, rows: Tensor) -> Tensor:
        """The position of each row: as many further on as documents have ended before it."""
        return rows + torch.searchsorted(self._first_rows, rows.contiguous(), right=True) - 1

    def all(self) -> Tensor:
        return self.positions(torch.arange(len(self)))

    def open(self, positions_P: Tensor) -> Tensor:
        """Which rows are open, given which positions are."""
        has_token_P = torch.ones(len(positions_P), dtype=torch.bool)
        has_token_P[self.starts[1:] - 1] = False
        return positions_P[has_token_P]


@dataclass(frozen=True)
class SomeRows:
    """Some of the rows, by position: those of documents that are not removed."""

    positions_R: Tensor

    def __len__(self) -> int:
        return len(self.positions_R)

    def positions(self, rows: Tensor) -> Tensor:
        return self.positions_R[rows]


def live_rows(stream: Stream, live: Sequence[Tensor | None]) -> Rows | SomeRows:
    """The rows of a stream that may be found; `live` says for each segment which positions may, None if all may."""
    rows = Rows.of(stream)
    if all(live_P is None for live_P in live):
        return rows
    sizes = [len(segment.tokens) for segment in stream.segments]
    each = [torch.ones(size).bool() if one is None else one for size, one in zip(sizes, live, strict=True)]
    positions_R = rows.all()
    return SomeRows(positions_R[torch.cat(each)[positions_R]])


@dataclass(frozen=True)
class Allowed:
    """Which store positions the queries of a search may find.

    `barred` is a range low..high (both included) for each query that it may not find, [N] each; `positions` says for
    every position of the store whether queries may find it, [P].
    """

    barred: tuple[Tensor, Tensor] | None = None
    positions: Tensor | None = None

    def within(self, first: int, last: int) -> Allowed:
        """The same for the positions from `first` on, before `last`, counted from there.

        >>> barred = (torch.tensor([3, 0]), torch.tensor([6, 2]))
        >>> [end.tolist() for end in Allowed(barred).within(5, 9).barred]
        [[0, 0], [1, -1]]
        """
        positions = None if self.positions is None else self.positions[first:last]
        if self.barred is None:
            return Allowed(None, positions)
        low = (self.barred[0] - first).clamp(min=0)
        high = (self.barred[1] - first).clamp(max=last - first - 1)
        inside = low <= high
        if not bool(inside.any()):
            return Allowed(None, positions)
        return Allowed((low.where(inside, 0), high.where(inside, -1)), positions)


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

    def similarity(self, keys_ND: Tensor, positions_NC: Tensor) -> Tensor:
        """The similarity of each query with some indexed positions, computed from the keys, [N, C]."""
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


def keys_of(encoded: Artifact, split: str) -> Array:
    """The search keys of a split, through all its segments: its states, or the keys stored with them."""
    return joined([files.array(key_file(encoded)) for files in files_of(encoded, f"{split}.")])


def key_file(encoded: Artifact) -> str:
    return "states.npy" if encoded.facts.get("key", "state") == "state" else "keys.npy"


def build_index(
    draft: Draft,
    encoded: Artifact,
    stream: Stream,
    config: IndexConfig,
    seed: int,
    spread: Spread = here,
    live: Sequence[Tensor | None] = (),
) -> Artifact:
    """Index the train split. Exact search needs no file of its own: it reads the store's keys.

    `live`, where documents were removed, says for each segment which positions may be found: the index is trained and
    compared with exact search on these. All rows are in it, as in the index of any segment.
    """
    rows = live_rows(stream, live)
    chosen = choose_index(config, len(rows), int(encoded.facts["width"]))
    if config.kind == "auto":
        say(f"index: auto chose {chosen.kind}, as {chosen.why}")
    facts: dict[str, Any] = {"rows": len(rows), "metric": config.metric, "kind": chosen.kind}
    if config.kind == "auto":
        facts |= {"asked": "auto", "why": chosen.why}
    if chosen.kind == "exact":
        say(f"index: exact search over {len(rows):,} rows")
        return draft.finish(facts)
    from gnnlm.retrieval.faiss_build import build_faiss_parts
    from gnnlm.retrieval.tombstones import without_removed

    parts = build_faiss_parts(draft, encoded, stream, config, seed, spread, rows)
    index = _opened(parts, encoded, stream, config.metric, config.probes)
    if isinstance(rows, SomeRows):
        each = zip(stream.segments, live, strict=True)
        index = without_removed(index, live, [len(live_rows(segment, [one])) for segment, one in each])
    keys_ND = checked_keys(encoded, seed)
    recall = checked_recall(index, encoded, rows, keys_ND)
    words = ", ".join(f"recall@{k} {value:.3f}" for k, value in recall.items())
    say(f"index: {words} of {len(keys_ND)} valid positions, against exact search")
    return draft.finish({**facts, "recall": recall, "recall_queries": len(keys_ND), "probes": config.probes})


def checked_keys(encoded: Artifact, seed: int) -> Tensor:
    """The keys of the valid positions on which an index is compared with exact search."""
    valid = keys_of(encoded, "valid")
    drawn = np.sort(np.random.default_rng(seed).permutation(len(valid))[:CHECKED])
    return read_rows(valid, torch.from_numpy(drawn))


def checked_recall(index: Index, encoded: Artifact, rows: Rows | SomeRows, keys_ND: Tensor) -> dict[str, float]:
    """What an index finds for these keys of what exact search of its rows does, for several k, as it is recorded."""
    from gnnlm.retrieval.index_recall import recall_of_index

    found = recall_of_index(index, keys_ND, keys_of(encoded, "train"), rows, CHECKED_KS)
    return {str(k): recall for k, recall in found.items()}


def open_index(made: Artifact, encoded: Artifact, stream: Stream, probes: int, device: str = "cpu") -> SegmentedIndex:
    """The index of a run over the keys of its store; a segment's part is read at the first search."""
    if made.facts["kind"] == "exact":
        return open_exact(encoded, stream, made.facts["metric"], device)
    parts = made.parts or (made,)  # an older run has the index of its one segment here
    return _opened([_later(part) for part in parts], encoded, stream, made.facts["metric"], probes)


def _later(part: Artifact) -> Callable[[], Path]:
    return lambda: part.file("index.faiss")


def _opened(
    files: Sequence[Path | Callable[[], Path]], encoded: Artifact, stream: Stream, metric: str, probes: int
) -> SegmentedIndex:
    """The FAISS index of each segment, from its file, which is asked for when the segment is first searched."""
    from gnnlm.retrieval.faiss_index import FaissIndex, open_faiss_index
    from gnnlm.retrieval.segmented import SegmentedIndex

    states = files_of(encoded, "train.")

    def opened(number: int) -> FaissIndex:
        keys, rows, file = states[number].array(key_file(encoded)), Rows.of(stream.segments[number]), files[number]
        return open_faiss_index(file if isinstance(file, Path) else file(), keys, rows, metric, probes)

    return SegmentedIndex.over(stream, metric, opened, assign=FaissIndex.assign)


def open_exact(encoded: Artifact, stream: Stream, metric: str, device: str = "cpu") -> SegmentedIndex:
    """Exact search over the keys of a store, whatever index its run has."""
    from gnnlm.retrieval.exact import ExactIndex
    from gnnlm.retrieval.segmented import SegmentedIndex

    files = files_of(encoded, "train.")

    def opened(number: int) -> Index:
        positions_R = Rows.of(stream.segments[number]).all()
        return ExactIndex.over(files[number].array(key_file(encoded)), positions_R, metric, device)

    return SegmentedIndex.over(stream, metric, opened)
