"""Searching: neighbour tables for train (with the leakage rule), valid and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.artifact import Artifact, Draft, require_space
from gnnlm.config import Config
from gnnlm.corpus.stream import Stream
from gnnlm.datastore.row_shards import Layout, RowShards, ShardTasks, shards_of_rows, work_of
from gnnlm.datastore.store import read_rows
from gnnlm.engine import Arrays, Spread, Work, here
from gnnlm.progress import Track
from gnnlm.retrieval.index import Allowed, Ids, Index
from gnnlm.retrieval.neighbours import NeighbourTable

ALL_SEARCHED = 65_536  # up to this many train positions, all are searched, so that the training may change later
MOST_READ = 0.8  # all are searched, too, if training reads more than this share of them


def searched_positions(config: Config, positions: int) -> int:
    """Return how many of the train positions that may be read are searched: all, or those that training reads."""
    train = config.train
    batches = sum(phase.steps for phase in train.curriculum) * train.accumulate
    read = batches * train.batch_blocks * train.block
    if positions <= ALL_SEARCHED or read > MOST_READ * positions:
        return positions
    if not config.gnn.layers or config.lm.is_trained:  # a base model trained here may leave fewer positions
        return positions
    return read


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
    def of(cls, config: Config, receptive_field: int, unbroken: bool = False) -> LeakageRule:
        """Make the rule that a config asks for, with a base model of this receptive field.

        Training reads blocks, and nothing is carried from one to the next; `unbroken` is for documents read whole.
        """
        gnn = config.gnn
        hops = max(0, gnn.layers - 1)  # the first layer retrieves, each later one passes on
        carried = hops * (gnn.context - 1)
        carried = carried if unbroken else min(config.train.block - 1, carried)
        return cls(receptive_field, max(gnn.left, gnn.right), config.exclude == "document", carried)

    @property
    def span(self) -> int:
        """How far, on either side, a position may not retrieve."""
        return self.receptive_field + self.reach + self.carried

    def excluded(self, positions: Ids, first: Ids, last: Ids, places: Ids | None = None) -> tuple[Ids, Ids]:
        """Return the range low..high (both included) that each position may not retrieve.

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
            low = np.searchsorted(places, here - span)
            high = np.searchsorted(places, here + span, side="right") - 1
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

    @cached_property
    def places(self) -> Ids | None:
        """The offset of each position in its text, where the rule asks for it."""
        return self.stream.places() if self.continuous and self.rule is not None else None

    def allowed(self, positions: Ids, places: Ids | None) -> Allowed | None:
        """Return the store positions that these positions may find."""
        if self.rule is None:
            return None
        number = self.stream.document_of(positions)
        first = self.stream.starts[number]
        last = self.stream.starts[number + 1] - 1
        low, high = self.rule.excluded(positions, first, last, places)
        return Allowed(barred=(torch.from_numpy(np.asarray(low)), torch.from_numpy(np.asarray(high))))


def build_tables(
    draft: Draft, splits: list[Queries], index: Index, rows: int, shard: int, spread: Spread = here
) -> Artifact:
    """Write a table for each split; `rows` is the store's size, `shard` the number of queries between two commits."""
    for queries in splits:
        if not queries.are_all:
            draft.save(f"{queries.stream.split}.positions.npy", queries.positions)
    needed = sum(8 * len(queries.positions) * queries.k for queries in splits)
    require_space(draft.folder, needed - draft.bytes_there, "the neighbour tables")
    by_split = {queries.stream.split: queries for queries in splits}
    seconds, short = {}, {}
    for split, queries in by_split.items():
        neighbours = SplitNeighbours(queries, index, rows, shard)
        tasks = ShardTasks(spread, "search", {"split": split})
        seconds[split] = neighbours.write(draft, f"search {split}", "queries", f"{split}.", tasks)
        short[split] = draft.notes.get(f"{split}.short", 0)
    k = {split: queries.k for split, queries in by_split.items()}
    return draft.finish({"k": k, "seconds": seconds, "short_of_k": short})


def ids_dtype(rows: int) -> np.dtype[Any]:
    """Return the type of positions in the tables of a store with this many.

    A store of half as many positions as 32 bits can number may double by added segments, and its type stays the same.

    >>> ids_dtype(1_000_000).name, ids_dtype(2**30).name
    ('int32', 'int64')
    """
    return np.dtype(np.int32 if rows < 2**30 else np.int64)


@dataclass(frozen=True)
class SplitNeighbours(RowShards):
    """The neighbours of the queries of a split in a store of `store_rows` positions, `shard_queries` at a time."""

    queries: Queries
    index: Index
    store_rows: int
    shard_queries: int

    @property
    def layouts(self) -> dict[str, Layout]:
        shape = (len(self.queries.positions), self.queries.k)
        return {"ids": Layout(shape, ids_dtype(self.store_rows)), "similarity": Layout(shape, np.float32)}

    @property
    def ends(self) -> list[int]:
        return shards_of_rows(len(self.queries.positions), self.shard_queries)

    def make(self, shard: int) -> Arrays:
        queries = self.queries
        positions = queries.positions[shard * self.shard_queries : (shard + 1) * self.shard_queries]
        keys_ND = read_rows(queries.keys, torch.from_numpy(positions))
        found = self.index.search(keys_ND, queries.k, queries.allowed(positions, queries.places))
        found = found.padded(queries.k).to("cpu")
        ids = found.positions.numpy().astype(ids_dtype(self.store_rows))
        return {"ids": ids, "similarity": found.similarity.numpy()}

    def counts(self, made: Arrays) -> dict[str, int]:
        return {"short": int((made["ids"][:, -1] < 0).sum())}


def search_work(splits: Sequence[Queries], index: Index, store_rows: int, shard_queries: int) -> Work:
    """Return the work of the tasks that search for the queries of some splits."""
    by_split = {queries.stream.split: queries for queries in splits}
    return work_of(lambda split: SplitNeighbours(by_split[split], index, store_rows, shard_queries))


def search_table(
    index: Index,
    keys_ND: Tensor,
    k: int,
    chunk: int,
    label: str,
    positions_N: Tensor | None = None,
    allowed: Allowed | None = None,
) -> NeighbourTable:
    """Search for some keys, `chunk` at a time, and keep the neighbours in memory.

    `positions_N` are the text positions of the keys, ascending, where they are not all of them. `allowed` may bar
    positions for all queries alike.
    """
    assert allowed is None or allowed.barred is None
    k = min(k, len(index))
    parts = []
    with Track(label, len(keys_ND), "queries") as track:
        for keys_nD in keys_ND.split(chunk):
            found = index.search(keys_nD, k, allowed).padded(k)
            parts.append((found.positions.cpu().numpy(), found.similarity.cpu().numpy()))
            track.advance(len(keys_nD))
    ids, similarity = map(np.concatenate, zip(*parts, strict=True))
    return NeighbourTable(ids, similarity, positions_N)


def open_table(tables: Artifact, split: str) -> NeighbourTable:
    """Open the neighbours of a split's positions."""
    some = f"{split}.positions.npy"
    queried = torch.from_numpy(np.array(tables.array(some))) if some in tables.manifest.files else None
    return NeighbourTable(tables.array(f"{split}.ids.npy"), tables.array(f"{split}.similarity.npy"), queried)
