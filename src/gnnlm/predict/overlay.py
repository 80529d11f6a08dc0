"""A predictor over a store with more segments than its run has: text that is held in memory for a while.

Its rows are made with the run's own parts: the codec's quantizer, and the trained network for the lines of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from gnnlm.datastore.codec import SegmentCodes
from gnnlm.datastore.quantize import CodedTable
from gnnlm.datastore.store import Segment, Store
from gnnlm.datastore.tables import JoinedTable, Table
from gnnlm.predict.predictor import Predictor
from gnnlm.predict.window_cache import WindowCache

Lines = Sequence[Table]  # of some rows, in each table of a cache


def coded_like(store: Store, states_PD: npt.NDArray[Any]) -> Table:
    """Return states as the store keeps those of its own segments: as they are, or coded with the same quantizer."""
    like = store.segments[0].states_PD
    if isinstance(like, Tensor):
        return torch.from_numpy(states_PD)
    codes = SegmentCodes(like.quantizer.to("cpu"), states_PD).in_memory()["codes"]
    return CodedTable(torch.from_numpy(codes), like.quantizer)


def cached_lines(predictor: Predictor, segment: Segment, first: int = 0) -> Lines:
    """Return the lines of a segment's rows from `first` on in each table of the cache; none if there is no cache."""
    cache = predictor.cache
    if cache is None:
        return []
    assert isinstance(cache, WindowCache)
    graphs = replace(predictor.graphs, store=Store([segment]))
    return cache.lines(graphs, range(first, len(segment)), str(predictor.head.device))


def with_segments(predictor: Predictor, store: Store, lines: Sequence[Lines]) -> Predictor:
    """Return the predictor over a store that has more segments, given the cache's lines of each."""
    graphs = replace(predictor.graphs, store=store)
    cache = predictor.cache
    if cache is not None:
        assert isinstance(cache, WindowCache)
        tables = [
            JoinedTable([*_parts(table), *(each[number] for each in lines)])
            for number, table in enumerate(cache.tables)
        ]
        cache = replace(cache, store=store, tables=tables)
    return replace(predictor, graphs=graphs, cache=cache)


def _parts(table: Table | JoinedTable) -> Sequence[Table]:
    return table.tables if isinstance(table, JoinedTable) else [table]
