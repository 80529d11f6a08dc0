"""The cache: neighbour states of a trained network, computed once per row.

No edge leads from a context to a neighbour, so what a layer reads of a window slot depends on (row, slot) alone.
Per layer there is one table:
- before the first window update, [positions, C]: overlapping windows share lines. One table then serves every layer
  that reads states.
- after an update, [rows, slots, C], for the slots that inter edges lead from.
States that no layer reads are left out: those after the last update, and all slots but the centre if only it is read.

C is the width of a state (`states`, scored and averaged in the absorbed form) or twice that (`projected`: keys and
values, token features included).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from gnnlm.artifact import Artifact
from gnnlm.config import CacheConfig
from gnnlm.datastore.quantize import CodedTable, Quantizer
from gnnlm.datastore.row_shards import Layout, RowShards, shards_of_rows, work_of
from gnnlm.datastore.store import Store, mapped
from gnnlm.datastore.tables import JoinedTable, Table, joined_table
from gnnlm.engine import Arrays, Work
from gnnlm.errors import ArtifactError
from gnnlm.gnn.gnn_options import GnnOptions
from gnnlm.gnn.layer import Sources
from gnnlm.gnn.layer_weights import NEIGHBOUR
from gnnlm.gnn.model import GnnModel, edge_lines, edge_mask
from gnnlm.graph.batch import Graph, Windows
from gnnlm.predict.graphs import GraphBuilder

QUANTIZERS = "quantizers.safetensors"
SHARD = 8192  # rows between two commits
DTYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True)
class WindowCache:
    """Tables of one form over a store, with the network that they were computed with."""

    model: GnnModel
    store: Store
    projected: bool
    tables: Sequence[Table | JoinedTable]

    def lines(self, graphs: GraphBuilder, rows: range, device: str) -> list[Table]:
        """Return the lines of some rows of another store in each table, made and stored as those of the cache are."""
        like = [table.tables[0] if isinstance(table, JoinedTable) else table for table in self.tables]
        quantizers = [table.quantizer for table in like if isinstance(table, CodedTable)]
        half = isinstance(like[0], Tensor) and like[0].dtype == torch.float16
        maker = TableMaker(self.model, "fp16" if half else "fp32", [each.to("cpu") for each in quantizers], device)
        made = SegmentTables(maker, graphs, rows, self.projected).in_memory().values()
        plain = [torch.from_numpy(array.reshape(-1, array.shape[-1])).to(device) for array in made]
        if quantizers:
            return [CodedTable(codes, quantizer) for codes, quantizer in zip(plain, quantizers, strict=True)]
        return list(plain)

    def sources(self, graph: Graph) -> Iterator[Sources]:
        """Yield the sources of the inter edges of each layer."""
        options = self.model.options
        windows = graph.windows
        mask_NS = edge_mask(graph, options.inter_slots)
        position_NS = edge_lines(graph, windows.place_UW[:, options.inter_slots])
        extra_tables: tuple[Tensor, ...] = ()
        extra_lines: tuple[Tensor, ...] = ()
        if options.token_features and not self.projected:
            known = len(windows.tokens_P) > 0  # else windows are positions in the store
            tokens_NS = windows.tokens_P[position_NS] if known else self.store.tokens(position_NS.cpu())
            lines_NS = self.model.features(tokens_NS.to(position_NS.device))
            extra_tables = (self.model.features_VE,)
            extra_lines = (lines_NS,)
        slots = torch.arange(inter_slots(options), device=mask_NS.device)
        slot_NS = edge_lines(graph, windows.rows_U[:, None] * len(slots) + slots)
        for number in range(options.layers):
            table = self.tables[min(number, len(self.tables) - 1)]
            line_NS = slot_NS if per_row(options, number) else position_NS
            yield Sources((table, *extra_tables), (line_NS, *extra_lines), mask_NS, self.projected)


def inter_slots(options: GnnOptions) -> int:
    return len(range(options.window)[options.inter_slots])


def per_row(options: GnnOptions, layer: int) -> bool:
    """Return whether the windows that a layer reads have been updated."""
    return layer > 0 and options.neighbour_updates


def table_shapes(options: GnnOptions, projected: bool, rows: int) -> list[tuple[int, ...]]:
    """Return the shapes of the tables of a form, for a store with `rows` rows."""
    width = options.width * (2 if projected else 1)
    shared = not projected and not options.neighbour_updates
    shapes: list[tuple[int, ...]] = []
    for number in range(1 if shared else options.layers):
        shapes.append((rows, inter_slots(options), width) if per_row(options, number) else (rows, width))
    return shapes


def make_tables(model: GnnModel, windows: Windows, projected: bool) -> list[Tensor]:
    """Return the lines of some windows: [P, C], by position, before the first window update, else [U, slots, C]."""
    options = model.options
    states_PD = model.enter(windows.states_PD, NEIGHBOUR)
    updated = model.window_states(states_PD, windows.place_UW, windows.slot_UW)
    tables = []
    for number in range(len(table_shapes(options, projected, 1))):
        layer = model.layer(number)
        changed = per_row(options, number)
        states = next(updated) if changed else states_PD
        table = layer.pre_norm(states)
        if projected:
            features = None
            if options.token_features:
                lines = model.features(windows.tokens_P)
                features = model.features_VE[lines[windows.place_UW[:, options.inter_slots]] if changed else lines]
            table = layer.project(table, features)
        tables.append(table)
    return tables


@dataclass(frozen=True)
class TableMaker:
    """What tables are made with: a network, their precision, and a quantizer for each if they are coded."""

    model: GnnModel
    dtype: str
    quantizers: Sequence[Quantizer]
    device: str

    @torch.inference_mode()
    def lines(self, graphs: GraphBuilder, rows_U: Tensor, projected: bool) -> list[npt.NDArray[Any]]:
        """Return the lines of some rows in every table, as they are stored."""
        tables = [table.numpy() for table in lines_of(self.model, graphs, rows_U, projected, self.device)]
        if not self.quantizers:
            return [rounded_table(table, self.dtype) for table in tables]
        return [
            quantizer.encode(table.reshape(-1, table.shape[-1])).reshape(*table.shape[:-1], quantizer.bytes)
            for table, quantizer in zip(tables, self.quantizers, strict=True)
        ]


@dataclass(frozen=True)
class SegmentTables(RowShards):
    """The lines of a segment in the tables of a cache; `span` is where the segment lies in the store of `graphs`."""

    maker: TableMaker
    graphs: GraphBuilder
    span: range
    projected: bool

    @property
    def layouts(self) -> dict[str, Layout]:
        maker = self.maker
        shapes = table_shapes(maker.model.options, self.projected, len(self.span))
        if not maker.quantizers:
            return {f"layer{number}": Layout(shape, DTYPES[maker.dtype]) for number, shape in enumerate(shapes)}
        sizes = [quantizer.bytes for quantizer in maker.quantizers]
        return {f"layer{n}": Layout((*shapes[n][:-1], size), np.uint8) for n, size in enumerate(sizes)}

    @property
    def ends(self) -> list[int]:
        return shards_of_rows(len(self.span), SHARD)

    def make(self, shard: int) -> Arrays:
        rows = self.span[shard * SHARD : (shard + 1) * SHARD]
        lines = self.maker.lines(self.graphs, torch.arange(rows.start, rows.stop), self.projected)
        return dict(zip(self.layouts, lines, strict=True))


def tables_work(maker: TableMaker, graphs: GraphBuilder) -> Work:
    """Return the work of the tasks that make the tables of the segments of a store."""
    bases = graphs.store.bases.tolist()

    def opened(segment: int, projected: bool) -> SegmentTables:
        return SegmentTables(maker, graphs, range(bases[segment], bases[segment + 1]), projected)

    return work_of(opened)


def open_cache(artifact: Artifact, model: GnnModel, store: Store, device: str) -> WindowCache | None:
    """Open the cache with its network; None if the run has no cache."""
    form = artifact.facts["form"]
    if form == "none":
        return None
    tensors = artifact.tensors(QUANTIZERS) if QUANTIZERS in artifact else {}
    tables: list[Table | JoinedTable] = []
    quantizers = quantizers_in(tensors)
    for number in range(len(table_shapes(model.options, form == "projected", 1))):
        arrays = [part.array(f"layer{number}.npy") for part in artifact.parts]
        plain = [mapped(array.reshape(-1, array.shape[-1])).to(device) for array in arrays]
        if quantizers:
            quantizer = quantizers[number].to(device)
            tables.append(joined_table([CodedTable(table, quantizer) for table in plain]))
        else:
            tables.append(joined_table(plain))
    return WindowCache(model, store, form == "projected", tables)


def cache_bytes(shapes: list[tuple[int, ...]], config: CacheConfig) -> int:
    total = 0
    for shape in shapes:
        stored, kind = _on_disk(shape, config)
        total += math.prod(stored) * np.dtype(kind).itemsize
    return total


def lines_of(model: GnnModel, graphs: GraphBuilder, rows_U: Tensor, projected: bool, device: str) -> list[Tensor]:
    """Return the lines of these rows in every table."""
    windows = graphs.windows(rows_U)
    centre_U = windows.place_UW[:, graphs.left]
    tables = make_tables(model, windows.to(torch.device(device)), projected)
    return [
        (table if per_row(model.options, number) else table[centre_U.to(device)]).float().cpu()
        for number, table in enumerate(tables)
    ]


def load_quantizers(path: Path) -> list[Quantizer]:
    """Load the quantizers in a file, one per table."""
    return quantizers_in(load_file(path))


def quantizers_in(tensors: dict[str, Tensor]) -> list[Quantizer]:
    count = len({name.partition(".")[0] for name in tensors})
    return [Quantizer.from_tensors(tensors, f"layer{number}.") for number in range(count)]


def _on_disk(shape: tuple[int, ...], config: CacheConfig) -> tuple[tuple[int, ...], Any]:
    if config.dtype == "pq":
        return (*shape[:-1], config.bytes), np.uint8
    return shape, DTYPES[config.dtype]


def rounded_table(table: Any, dtype: str) -> Any:
    with np.errstate(over="ignore"):
        rounded = table.astype(DTYPES[dtype])
    if not np.isfinite(rounded).all():
        raise ArtifactError(
            f"neighbour states do not fit in {dtype} (largest magnitude {np.abs(table).max():.3g}); set "
            "cache.dtype: fp32"
        )
    return rounded
