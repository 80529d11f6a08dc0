"""The search stage: neighbour tables for train (with the leakage rule), valid and test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gnnlm.artifact import Artifact, Draft, require_space
from gnnlm.config import Config
from gnnlm.corpus.stream import Stream
from gnnlm.datastore.store import mapped
from gnnlm.progress import Track
from gnnlm.retrieval.index import Allowed, Ids, Index
from gnnlm.retrieval.neighbours import NeighbourTable


@dataclass(frozen=True)
class LeakageRule:
    """What a train position may not retrieve from its own document.

    The state of a window node within `receptive_field` of the query, on either side, has read tokens that
    the query predicts or has read itself. Windows extend `reach` positions past their row. What a position retrieves
    is carried along context edges to positions up to `carried` further on, whose tokens it must not have read either.
    So rows within receptive_field + reach + carried are dropped. With `whole_document`, all rows of the document are.
    """

    receptive_field: int
    reach: int
    whole_document: bool
    carried: int = 0

    @classmethod
    def of(cls, config: Config, receptive_field: int) -> LeakageRule:
        """The rule that a config asks for, with a base model of this receptive field."""
        gnn = config.gnn
        hops = max(0, gnn.layers - 1)  # the first layer retrieves, each later one passes on
        carried = min(config.train.block - 1, hops * (gnn.context - 1))
        return cls(receptive_field, max(gnn.left, gnn.right), config.exclude == "document", carried)

    @property
    def span(self) -> int:
        """How far, on either side, a position may not retrieve."""
        return self.receptive_field + self.reach + self.carried

    def excluded(self, positions: Ids, first: Ids, last: Ids, places: Ids | None = None) -> tuple[Ids, Ids]:
        """The range low..high (both included) that each position may not retrieve.

        `first` and `last` bound its document. `places` are given where the LM read on from document to document: the
        receptive field then crosses their bounds.

        >>> rule = LeakageRule(receptive_field=2, reach=1, whole_document=False)
        >>> low, high = rule.excluded(np.array([10]), np.array([8]), np.array([30]))
        >>> int(low[0]), int(high[0])
        (8, 13)
        """
        span = self.span
        if places is not None:
            here = places[positions]
            low, high = np.searchsorted(places, here - span), np.searchsorted(places, here + span, side="right") - 1
            return (np.minimum(low, first), np.maximum(high, last)) if self.whole_document else (low, high)
        if self.whole_document:
            return first, last
        return np.maximum(positions - span, first), np.minimum(positions + span, last)


@dataclass(frozen=True)
class Queries:
    """The queries of a split: some of its positions, with their keys, each for k neighbours.

    `rule`, where given, bars rows of the split itself, which is then the store. `continuous`: the LM read on from
    document to document.
    """

    stream: Stream
    keys: npt.NDArray[Any]
    positions: Ids
    k: int
    rule: LeakageRule | None = None
    continuous: bool = False

    @property
    def are_all(self) -> bool:
        return len(self.positions) == len(self.stream)

    def allowed(self, positions: Ids, places: Ids | None) -> Allowed | None:
        """The store positions that these positions may find."""
        if self.rule is None:
            return None
        number = self.stream.document_of(positions)
        first, last = self.stream.starts[number], self.stream.starts[number + 1] - 1
        low, high = self.rule.excluded(positions, first, last, places)
        return Allowed(barred=(torch.from_numpy(np.asarray(low)), torch.from_numpy(np.asarray(high))))


def build_tables(draft: Draft, splits: list[Queries], index: Index, rows: int, shard: int) -> Artifact:
    """A table for each split; `rows` is the store's size, `shard` the number of queries between two commits."""
    for queries in splits:
        if not queries.are_all:
            draft.save(f"{queries.stream.split}.positions.npy", queries.positions)
    needed = sum(8 * len(queries.positions) * queries.k for queries in splits)
    require_space(draft.folder, needed - draft.bytes_there, "the neighbour tables")
    for queries in splits:
        _fill_table(draft, queries, index, np.dtype(np.int32 if rows < 2**31 else np.int64), shard)
    names = [queries.stream.split for queries in splits]
    return draft.finish(
        {
            "k": {queries.stream.split: queries.k for queries in splits},
            "seconds": {split: draft.notes[f"{split}.seconds"] for split in names},
            "short_of_k": {split: draft.notes[f"{split}.short"] for split in names},
        }
    )


def _fill_table(draft: Draft, queries: Queries, index: Index, ids_dtype: np.dtype[Any], shard: int) -> None:
    """Write a line for each queried position; resumes after the last complete shard."""
    split, rows, keys = queries.stream.split, len(queries.positions), mapped(queries.keys)
    ids = draft.writer(f"{split}.ids.npy", (rows, queries.k), ids_dtype)
    similarity = draft.writer(f"{split}.similarity.npy", (rows, queries.k), np.float32)
    seconds, short = draft.notes.get(f"{split}.seconds", 0.0), draft.notes.get(f"{split}.short", 0)
    places = queries.stream.places() if queries.continuous and queries.rule is not None else None
    with Track(f"search {split}", rows, "queries", ids.rows) as track:
        for start in range(ids.rows, rows, shard):
            positions = queries.positions[start : start + shard]
            found = index.search(
                keys[torch.from_numpy(positions)], queries.k, queries.allowed(positions, places)
            ).padded(queries.k)
            ids.append(found.positions.cpu().numpy())
            similarity.append(found.similarity.cpu().numpy())
            short += int((found.positions[:, -1] < 0).sum())
            draft.notes.update({f"{split}.seconds": seconds + track.seconds, f"{split}.short": short})
            draft.commit()
            track.advance(len(positions))


def open_table(tables: Artifact, split: str) -> NeighbourTable:
    """The neighbours of a split's positions."""
    some = f"{split}.positions.npy"
    queried = torch.from_numpy(np.array(tables.array(some))) if some in tables.manifest["files"] else None
    return NeighbourTable(tables.array(f"{split}.ids.npy"), tables.array(f"{split}.similarity.npy"), queried)
