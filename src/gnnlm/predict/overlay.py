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

from gnnlm.datastore.quantize import CodedTable, Quantizer
from gnnlm.datastore.store import Store
from gnnlm.datastore.tables import JoinedTable, Table
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.predictor import Predictor
from gnnlm.predict.window_cache import SHARD, WindowCache, lines_of, rounded_table

Lines = Sequence[Table]  # of some rows, in each table of a cache


def coded_like(store: Store, states_PD: npt.NDArray[Any]) -> Tensor | CodedTable:
    """States as the store keeps those of its own segments: as they are, or coded with the same quantizer."""
    kept = store.segments[0].states_PD
    if isinstance(kept, Tensor):
        return torch.from_numpy(states_PD)
    return CodedTable(_codes(kept.quantizer, states_PD), kept.quantizer)


@torch.inference_mode()
def cached_lines(predictor: Predictor, graphs: GraphBuilder, rows_R: Tensor) -> Lines:
    """The lines of some rows of an extended store in each table of the cache; none if there is no cache."""
    cache = predictor.cache
    if cache is None:
        return []
    assert isinstance(cache, WindowCache)
    device = predictor.head.device
    parts = [
        lines_of(cache.model, graphs, rows_R[start : start + SHARD], cache.projected, str(device))
        for start in range(0, len(rows_R), SHARD)
    ]
    made = [torch.cat(tables).flatten(0, -2) for tables in zip(*parts, strict=True)]
    return [_stored(lines, table, device) for lines, table in zip(made, cache.tables, strict=True)]


def with_segments(predictor: Predictor, store: Store, lines: Sequence[Lines]) -> Predictor:
    """The predictor over a store that has more segments, given the cache's lines of each."""
    graphs, cache = replace(predictor.graphs, store=store), predictor.cache
    if cache is not None:
        assert isinstance(cache, WindowCache)
        tables = [
            JoinedTable([*_parts(table), *(each[number] for each in lines)])
            for number, table in enumerate(cache.tables)
        ]
        cache = replace(cache, store=store, tables=tables)
    return replace(predictor, graphs=graphs, cache=cache)


def _stored(lines_RC: Tensor, table: Table | JoinedTable, device: torch.device) -> Table:
    """Lines as the table has its own: in its precision, or coded."""
    like = _parts(table)[0]
    if isinstance(like, CodedTable):
        return CodedTable(_codes(like.quantizer, lines_RC.numpy()).to(device), like.quantizer)
    kind = "fp16" if like.dtype == torch.float16 else "fp32"
    return torch.from_numpy(rounded_table(lines_RC.numpy(), kind)).to(device)


def _codes(quantizer: Quantizer, vectors_RD: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(quantizer.to("cpu").encode(vectors_RD))


def _parts(table: Table | JoinedTable) -> Sequence[Table]:
    return table.tables if isinstance(table, JoinedTable) else [table]
