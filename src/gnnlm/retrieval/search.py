"""The search stage: neighbour tables for train (with the leakage rule), valid and test.

A table has, for each query position, the nearest store positions and their similarity, nearest first;
-1 and minus infinity where there are too few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.artifact import Artifact, Draft, require_space
from gnnlm.config import SearchConfig
from gnnlm.corpus.stream import Stream
from gnnlm.progress import Track
from gnnlm.retrieval.index import Floats, Ids, Index, keys_of

FETCH_AT_ONCE = 2**26  # rows asked of the index in one call, over all queries: 0.8 GB


@dataclass(frozen=True)
class LeakageRule:
    """What a train position may not retrieve from its own document.

    The state of a window node within `receptive_field` of the query, on either side, has read tokens that
    the query predicts or has read itself. Windows reach `reach` past their row, so rows within
    receptive_field + reach are dropped. With `whole_document`, all rows of the document are.
    """

    receptive_field: int
    reach: int
    whole_document: bool

    def excluded(self, positions: Ids, first: Ids, last: Ids, places: Ids | None = None) -> tuple[Ids, Ids]:
        """The range low..high (both included) that each position may not retrieve.

        `first` and `last` bound its document. `places` are given where the LM read on from document to document: the
        receptive field then crosses their bounds.

        >>> rule = LeakageRule(receptive_field=2, reach=1, whole_document=False)
        >>> low, high = rule.excluded(np.array([10]), np.array([8]), np.array([30]))
        >>> int(low[0]), int(high[0])
        (8, 13)
        """
        span = self.receptive_field + self.reach
        if places is not None:
            here = places[positions]
            low, high = np.searchsorted(places, here - span), np.searchsorted(places, here + span, side="right") - 1
            return (np.minimum(low, first), np.maximum(high, last)) if self.whole_document else (low, high)
        if self.whole_document:
            return first, last
        return np.maximum(positions - span, first), np.minimum(positions + span, last)


def search_allowed(
    index: Index,
    states: npt.NDArray[Any],
    k: int,
    allowed: Callable[[Ids, Ids], npt.NDArray[np.bool_]],
    forbidden: npt.NDArray[np.integer],
) -> tuple[Ids, Floats]:
    """The k nearest rows that each query may retrieve.

    `allowed(lines, found)` tells which of the rows found for some queries they may have; `forbidden` bounds how many
    each may not. Twice k are fetched and filtered; queries that keep too few are searched again with four times as
    many, up to the point where forbidden rows cannot be what is in the way.
    """
    ids = np.full((len(states), k), -1, dtype=np.int64)
    similarity = np.full((len(states), k), -np.inf, dtype=np.float32)
    enough = np.minimum(k + forbidden, len(index))
    lines, fetch = np.arange(len(states)), 2 * k
    while len(lines):
        for part in np.array_split(lines, -(-len(lines) * fetch // FETCH_AT_ONCE)):
            found, scores = index.search(states[part], fetch)
            ids[part], similarity[part] = compact(found, scores, (found >= 0) & allowed(part, found), k)
        lines = lines[(ids[lines, -1] < 0) & (fetch < enough[lines])]
        fetch *= 4
    return ids, similarity


def search_outside(index: Index, states: npt.NDArray[Any], low: Ids, high: Ids, k: int) -> tuple[Ids, Floats]:
    """The k nearest rows outside each query's range low..high."""

    def outside(lines: Ids, found: Ids) -> npt.NDArray[np.bool_]:
        answer: npt.NDArray[np.bool_] = (found < low[lines, None]) | (found > high[lines, None])
        return answer

    return search_allowed(index, states, k, outside, high - low + 1)


def compact(ids: Ids, similarity: Floats, keep: npt.NDArray[np.bool_], k: int) -> tuple[Ids, Floats]:
    """Move the kept entries of each line to its front, in order, and cut or pad to k.

    >>> compact(np.array([[7, 8, 9]]), np.array([[3., 2., 1.]], np.float32), np.array([[False, True, True]]), 2)
    (array([[8, 9]]), array([[2., 1.]], dtype=float32))
    """
    order = np.argsort(~keep, axis=1, kind="stable")[:, :k]
    ids = np.take_along_axis(np.where(keep, ids, -1), order, axis=1)
    similarity = np.take_along_axis(np.where(keep, similarity, -np.inf), order, axis=1)
    missing = ((0, 0), (0, k - ids.shape[1]))
    return np.pad(ids, missing, constant_values=-1), np.pad(similarity, missing, constant_values=-np.inf)


def search_split(
    draft: Draft,
    stream: Stream,
    keys: npt.NDArray[Any],
    index: Index,
    k: int,
    rule: LeakageRule | None,
    shard: int,
    continuous: bool,
    wanted: Ids,
) -> None:
    """Fill a split's table, a line for each of the wanted positions; goes on from the last whole shard."""
    rows = len(wanted)
    places = stream.places() if continuous else None
    split = stream.split
    ids = draft.writer(f"{split}.ids.npy", (rows, k), np.int32 if index.positions[-1] < 2**31 else np.int64)
    similarity = draft.writer(f"{split}.similarity.npy", (rows, k), np.float32)
    seconds = draft.notes.get(f"{split}.seconds", 0.0)
    short = draft.notes.get(f"{split}.short", 0)
    with Track(f"search {split}", rows, "queries", ids.rows) as track:
        for start in range(ids.rows, rows, shard):
            positions = wanted[start : start + shard]
            queries = keys[positions]
            if rule is None:
                found, scores = index.search(queries, k)
                found, scores = compact(found, scores, found >= 0, k)
            else:
                number = stream.document_of(positions)
                bounds = rule.excluded(positions, stream.starts[number], stream.starts[number + 1] - 1, places)
                found, scores = search_outside(index, queries, *bounds, k)
            ids.append(found)
            similarity.append(scores)
            short += int((found[:, -1] < 0).sum())
            draft.notes.update({f"{split}.seconds": seconds + track.seconds, f"{split}.short": short})
            draft.commit()
            track.advance(len(positions))


def build_neighbours(
    draft: Draft,
    streams: dict[str, Stream],
    store: Artifact,
    index: Index,
    config: SearchConfig,
    rule: LeakageRule,
    continuous: bool = False,
    wanted: Ids | None = None,
    unread: npt.NDArray[Any] | None = None,
) -> Artifact:
    """Tables of graph_k for train and of k for valid and test, both capped by the store.

    `wanted` are the train positions that are looked up; all, where not given. Where they are not all, they are kept
    beside the table. `unread` are the keys that train positions are looked up by, where these are not the store's.
    """
    ks = {split: min(config.graph_k if split == "train" else config.k, len(index)) for split in streams}
    asked: dict[str, Ids] = {split: np.arange(len(stream)) for split, stream in streams.items()}
    asked["train"] = (asked["train"] if wanted is None else wanted)[: config.max_train]
    if len(asked["train"]) < len(streams["train"]):
        draft.save("train.positions.npy", asked["train"])
    needed = sum(8 * len(asked[split]) * ks[split] for split in streams)
    require_space(draft.folder, needed - draft.bytes_there, "the neighbour tables")
    for split, stream in streams.items():
        barred = rule if split == "train" else None
        keys = unread if split == "train" and unread is not None else keys_of(store, split)
        shard = config.shard_queries
        search_split(draft, stream, keys, index, ks[split], barred, shard, continuous, asked[split])
    return draft.finish(
        {
            "k": ks,
            "seconds": {split: draft.notes[f"{split}.seconds"] for split in streams},
            "short_of_k": {split: draft.notes[f"{split}.short"] for split in streams},
        }
    )
