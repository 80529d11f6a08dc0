"""The cache stage: neighbour states of a trained network, computed once per row.

No edge leads from a context to a neighbour, so what a layer reads of a window slot depends on (row, slot) alone.
Per layer there is one table:
- while windows have not been updated, [positions, C]: windows share what they have in common. One table then serves
  every layer that reads states.
- after an update, [rows, slots, C], for the slots that inter edges lead from.
States that no layer reads (those behind the last update, slots beside the centre where only it is read) are left out.

C is the width of a state (`states`, scored and averaged in the absorbed form) or twice that (`projected`: keys and
values, token features included).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnnlm.artifact import Artifact, Draft, human_bytes, require_space, writing
from gnnlm.config import CacheConfig
from gnnlm.datastore.quantize import CodedTable, Quantizer, train_quantizer
from gnnlm.datastore.store import mapped
from gnnlm.errors import ArtifactError
from gnnlm.gnn.layer import Sources
from gnnlm.gnn.model import GnnModel, edge_lines, edge_mask
from gnnlm.gnn.options import GnnOptions
from gnnlm.graph.assemble import Assembler
from gnnlm.graph.batch import Graph, Windows
from gnnlm.progress import Track, say

SHARD = 8192  # rows between two points of resumption
TRAIN_ROWS = 16_384  # rows whose states a quantizer is learned from
TRIAL_TOKENS = 128  # tokens that `auto` times each form on
DTYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True)
class WindowCache:
    """Tables of one form, in front of the network they were made with."""

    model: GnnModel
    projected: bool
    tables: Sequence[Tensor | CodedTable]

    def sources(self, graph: Graph) -> Iterator[Sources]:
        """What the inter edges of each layer read."""
        options, windows = self.model.options, graph.windows
        mask_NS = edge_mask(graph, options.inter_slots)
        position_NS = edge_lines(graph, windows.place_UW[:, options.inter_slots])
        extra_tables: tuple[Tensor, ...] = ()
        extra_lines: tuple[Tensor, ...] = ()
        if options.token_features and not self.projected:
            lines_NS = self.model.features(windows.tokens_P[position_NS])
            extra_tables, extra_lines = (self.model.features_VE,), (lines_NS,)
        slots = torch.arange(inter_slots(options), device=mask_NS.device)
        slot_NS = edge_lines(graph, windows.rows_U[:, None] * len(slots) + slots)
        for number in range(options.layers):
            table = self.tables[min(number, len(self.tables) - 1)]
            line_NS = slot_NS if per_row(options, number) else position_NS
            yield Sources((table, *extra_tables), (line_NS, *extra_lines), mask_NS, self.projected)


def inter_slots(options: GnnOptions) -> int:
    return len(range(options.window)[options.inter_slots])


def per_row(options: GnnOptions, layer: int) -> bool:
    """Whether the windows that a layer reads have been updated."""
    return layer > 0 and options.neighbour_updates


def table_shapes(options: GnnOptions, projected: bool, rows: int) -> list[tuple[int, ...]]:
    """The tables of a form over a store of so many rows."""
    width = options.width * (2 if projected else 1)
    shared = not projected and not options.neighbour_updates
    shapes: list[tuple[int, ...]] = []
    for number in range(1 if shared else options.layers):
        shapes.append((rows, inter_slots(options), width) if per_row(options, number) else (rows, width))
    return shapes


def make_tables(model: GnnModel, windows: Windows, projected: bool) -> list[Tensor]:
    """The lines of some windows: [P, C] of their positions where windows are as they came, else [U, slots, C]."""
    options = model.options
    states_PD = model.enter(windows.states_PD)
    updated = model.window_states(states_PD, windows.place_UW, windows.slot_UW)
    tables = []
    for number in range(len(table_shapes(options, projected, 1))):
        layer, changed = model.layer(number), per_row(options, number)
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


@torch.inference_mode()
def build_cache(
    draft: Draft, model: GnnModel, source: Assembler, k: int, config: CacheConfig, seed: int, device: str
) -> Artifact:
    """Make the tables of the chosen form, shard by shard. `source` is what `auto` is tried on."""
    model.eval()
    rows, options = len(source.store), model.options
    if not draft.resumed:
        draft.notes.update(choose_form(model, source, k, config, device))
    form = draft.notes["form"]
    facts = {"form": form, "dtype": config.dtype, "rows": rows, "trials": draft.notes["trials"]}
    if form == "none":
        say("cache: none, neighbour states are computed for each batch")
        return draft.finish(facts)
    shapes = table_shapes(options, form == "projected", rows)
    size = cache_bytes(shapes, config)
    say(f"cache: {form} of {rows:,} rows as {config.dtype}, {human_bytes(size)}")
    require_space(draft.folder, size - draft.bytes_there, "the cache")
    quantizers = _quantizers(draft, model, source, config, seed, device) if config.dtype == "pq" else []
    writers = [draft.writer(f"layer{number}.npy", *_on_disk(shape, config)) for number, shape in enumerate(shapes)]
    if not draft.resumed:
        draft.commit()
    with Track("cache", rows, "rows", writers[0].rows) as track:
        for start in range(writers[0].rows, rows, SHARD):
            tables = _rows_of(model, source, torch.arange(start, min(start + SHARD, rows)), form == "projected", device)
            for number, (writer, table) in enumerate(zip(writers, tables, strict=True)):
                if quantizers:
                    codes = quantizers[number].encode(table.flatten(0, -2).numpy())
                    writer.append(codes.reshape(*table.shape[:-1], -1))
                else:
                    writer.append(_rounded(table.numpy(), config.dtype))
            draft.commit()
            track.advance(len(tables[0]))
    return draft.finish({**facts, "bytes": size})


def open_cache(artifact: Artifact, model: GnnModel, device: str) -> WindowCache | None:
    """The cache in front of its network; None where there is nothing to read."""
    form = artifact.facts["form"]
    if form == "none":
        return None
    tensors = artifact.tensors("quantizers.safetensors") if "quantizers.safetensors" in artifact else {}
    tables: list[Tensor | CodedTable] = []
    for number in range(len(table_shapes(model.options, form == "projected", 1))):
        array = artifact.array(f"layer{number}.npy")
        table = mapped(array.reshape(-1, array.shape[-1])).to(device)
        if tensors:
            tables.append(CodedTable(table, Quantizer.from_tensors(tensors, f"layer{number}.").to(device)))
        else:
            tables.append(table)
    return WindowCache(model, form == "projected", tables)


def cache_bytes(shapes: list[tuple[int, ...]], config: CacheConfig) -> int:
    total = 0
    for shape in shapes:
        stored, kind = _on_disk(shape, config)
        total += math.prod(stored) * np.dtype(kind).itemsize
    return total


@torch.inference_mode()
def choose_form(model: GnnModel, source: Assembler, k: int, config: CacheConfig, device: str) -> dict[str, Any]:
    """The form asked for; for `auto` the fastest on the first tokens of `source` that stays within the limit."""
    if config.form != "auto":
        return {"form": config.form, "trials": []}
    positions_1T, place = torch.arange(min(TRIAL_TOKENS, len(source.queries)))[None], torch.device(device)
    graph = source(positions_1T, k).to(place)
    windows = graph.windows  # tables that hold these windows alone, in their order
    own = replace(graph, windows=replace(windows, rows_U=torch.arange(len(windows.rows_U), device=place)))
    trials: list[dict[str, Any]] = [
        {"form": "none", "bytes": 0, "seconds": _seconds(lambda: model(source(positions_1T, k).to(place)))}
    ]
    for form in ("states",) if config.dtype == "pq" else ("states", "projected"):
        size = cache_bytes(table_shapes(model.options, form == "projected", len(source.store)), config)
        tables = [table.flatten(0, -2) for table in make_tables(model, windows, form == "projected")]
        if config.dtype == "fp16":
            tables = [table.half() for table in tables]
        cache = WindowCache(model, form == "projected", tables)

        def score(cache: WindowCache = cache) -> None:
            source(positions_1T, k, states=False)
            model(own, cache=cache)

        trials.append({"form": form, "bytes": size, "seconds": _seconds(score)})
    for trial in trials:
        speed = positions_1T.numel() / trial["seconds"]
        say(f"cache: tried {trial['form']} ({human_bytes(trial['bytes'])}): {speed:,.0f} tokens/s")
    fitting = [trial for trial in trials if trial["bytes"] <= config.limit_gb * 1e9]
    return {"form": min(fitting, key=lambda trial: trial["seconds"])["form"], "trials": trials}


def _seconds(work: Callable[[], object]) -> float:
    """The best of three, after one to warm up."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _rows_of(model: GnnModel, source: Assembler, rows_U: Tensor, projected: bool, device: str) -> list[Tensor]:
    """The lines of these rows in every table."""
    windows = source.windows(rows_U)
    centre_U = windows.place_UW[:, source.left]
    tables = make_tables(model, windows.to(torch.device(device)), projected)
    return [
        (table if per_row(model.options, number) else table[centre_U.to(device)]).float().cpu()
        for number, table in enumerate(tables)
    ]


def _quantizers(
    draft: Draft, model: GnnModel, source: Assembler, config: CacheConfig, seed: int, device: str
) -> list[Quantizer]:
    """One quantizer per table, learned from rows drawn from the whole store."""
    file = draft.file("quantizers.safetensors")
    count = len(table_shapes(model.options, False, 1))
    if not draft.resumed:
        rows = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(len(source.store))[:TRAIN_ROWS]))
        say(f"cache: learning {config.bytes} bytes a state from {len(rows):,} rows")
        tables = _rows_of(model, source, rows, False, device)
        tensors: dict[str, Tensor] = {}
        for number, table in enumerate(tables):
            sample = table.flatten(0, -2).numpy()
            tensors |= train_quantizer(sample, config.bytes, seed, "cache.bytes").tensors(f"layer{number}.")
        with writing(file):
            save_file(tensors, file)
    loaded = load_file(file)
    return [Quantizer.from_tensors(loaded, f"layer{number}.") for number in range(count)]


def _on_disk(shape: tuple[int, ...], config: CacheConfig) -> tuple[tuple[int, ...], Any]:
    if config.dtype == "pq":
        return (*shape[:-1], config.bytes), np.uint8
    return shape, DTYPES[config.dtype]


def _rounded(table: Any, dtype: str) -> Any:
    with np.errstate(over="ignore"):
        rounded = table.astype(DTYPES[dtype])
    if not np.isfinite(rounded).all():
        raise ArtifactError(
            f"neighbour states do not fit in {dtype} (largest magnitude {np.abs(table).max():.3g}); set "
            "cache.dtype: fp32"
        )
    return rounded
