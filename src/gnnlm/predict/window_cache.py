"""The cache stage: neighbour states of a trained network, computed once per row.

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

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnnlm.artifact import Artifact, Draft, disk, file_digest, human_bytes, writing
from gnnlm.config import CacheConfig
from gnnlm.corpus.stream import part_name
from gnnlm.datastore.quantize import CodedTable, Quantizer, train_quantizer
from gnnlm.datastore.store import Store, mapped
from gnnlm.datastore.tables import JoinedTable, joined_table
from gnnlm.engine import Spread, Task, here, load_arrays, save_arrays
from gnnlm.errors import ArtifactError
from gnnlm.gnn.gnn_options import GnnOptions
from gnnlm.gnn.layer import NEIGHBOUR, Sources
from gnnlm.gnn.model import GnnModel, edge_lines, edge_mask
from gnnlm.graph.batch import Context, Graph, Windows
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.progress import Track, numbered, say
from gnnlm.retrieval.neighbours import Neighbours

PART, QUANTIZERS = "cache", "quantizers.safetensors"
SHARD = 8192  # rows between two commits
TRAIN_ROWS = 16_384  # rows whose states a quantizer is learned from
TRIAL_TOKENS = 128  # tokens on which `auto` times each form,
TRIAL_SECONDS = 1.0  # for at least this many seconds in all,
TRIAL_ROUNDS = 20  # or for this many rounds
NOISE = 0.1  # forms whose times differ by less than this share count as equally fast
DTYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True)
class WindowCache:
    """Tables of one form over a store, with the network that they were computed with."""

    model: GnnModel
    store: Store
    projected: bool
    tables: Sequence[Tensor | CodedTable | JoinedTable]

    def sources(self, graph: Graph) -> Iterator[Sources]:
        """What the inter edges of each layer read."""
        options, windows = self.model.options, graph.windows
        mask_NS = edge_mask(graph, options.inter_slots)
        position_NS = edge_lines(graph, windows.place_UW[:, options.inter_slots])
        extra_tables: tuple[Tensor, ...] = ()
        extra_lines: tuple[Tensor, ...] = ()
        if options.token_features and not self.projected:
            known = len(windows.tokens_P) > 0  # else windows are positions in the store
            tokens_NS = windows.tokens_P[position_NS] if known else self.store.tokens(position_NS.cpu())
            lines_NS = self.model.features(tokens_NS.to(position_NS.device))
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
    """The shapes of the tables of a form, for a store with `rows` rows."""
    width = options.width * (2 if projected else 1)
    shared = not projected and not options.neighbour_updates
    shapes: list[tuple[int, ...]] = []
    for number in range(1 if shared else options.layers):
        shapes.append((rows, inter_slots(options), width) if per_row(options, number) else (rows, width))
    return shapes


def make_tables(model: GnnModel, windows: Windows, projected: bool) -> list[Tensor]:
    """The lines of some windows: [P, C], by position, before the first window update, else [U, slots, C]."""
    options = model.options
    states_PD = model.enter(windows.states_PD, NEIGHBOUR)
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


@dataclass(frozen=True)
class Trial:
    """Tokens with their neighbours, on which the forms of a cache are timed."""

    context: Context
    neighbours: Neighbours


@torch.inference_mode()
def build_cache(
    draft: Draft,
    model: GnnModel,
    graphs: GraphBuilder,
    trial: Trial,
    config: CacheConfig,
    seed: int,
    device: str,
    made_from: Sequence[Mapping[str, Any]],
    spread: Spread = here,
) -> Artifact:
    """Build the tables of the chosen form, segment by segment; `auto` times the forms on `trial`.

    `made_from` says for each segment which network and which states its tables are made from.
    """
    model.freeze()
    rows, options = len(graphs.store), model.options
    if not draft.resumed:
        draft.notes.update(choose_form(model, graphs, trial, config, device))
    form = draft.notes["form"]
    facts = {"form": form, "dtype": config.dtype, "rows": rows, "trials": draft.notes["trials"]}
    if form == "none":
        say("cache: none; neighbour states are computed for each batch")
        return draft.finish(facts)
    shapes = table_shapes(options, form == "projected", rows)
    size = cache_bytes(shapes, config)
    say(f"cache: {form} of {rows:,} rows as {config.dtype}, {human_bytes(size)}")
    if config.dtype == "pq" and not draft.resumed:
        learn = partial(learn_quantizers, model, graphs, config, seed, device)
        for path in spread(draft.shards, learn, [Task("quantizers", QUANTIZERS)]):
            disk.rename(path, draft.file(QUANTIZERS))
            draft.commit(QUANTIZERS)
    elif not draft.resumed:
        draft.commit()
    quantizers = load_quantizers(draft.folder, model, config)
    tables = TablesWriter(model, graphs, config, quantizers, device)
    learned = file_digest(draft.folder / QUANTIZERS) if quantizers else None
    inputs = [tables_inputs(each, form, config.dtype, learned) for each in made_from]
    names = [part_name(number, PART) for number in range(len(inputs))]
    sizes = [
        cache_bytes(table_shapes(options, form == "projected", len(part)), config) for part in graphs.store.segments
    ]
    draft.require_space(dict(zip(names, zip(inputs, sizes, strict=True), strict=True)), 0, "the cache")
    reads = (f"{draft.folder.name}/{QUANTIZERS}",) if quantizers else ()
    for number, (first, last) in enumerate(itertools.pairwise(graphs.store.bases.tolist())):
        label = numbered("cache", number, len(names))
        rows_of = range(first, last)
        part = partial(
            tables.write, rows=rows_of, projected=form == "projected", label=label, spread=spread, reads=reads
        )
        draft.part(names[number], inputs[number], part)
    return draft.finish({**facts, "bytes": size})


def tables_inputs(made_from: Mapping[str, Any], form: str, dtype: str, quantizers: str | None) -> dict[str, Any]:
    """What the tables of a segment are made from; `quantizers` is the checksum of their file, if there is one."""
    return {**made_from, "form": form, "dtype": dtype, "quantizers": quantizers}


@dataclass(frozen=True)
class TablesWriter:
    """Writes the tables of some rows."""

    model: GnnModel
    graphs: GraphBuilder
    config: CacheConfig
    quantizers: Sequence[Quantizer]
    device: str

    def write(
        self, draft: Draft, rows: range, projected: bool, label: str, spread: Spread, reads: tuple[str, ...]
    ) -> dict[str, Any]:
        """Write the tables of these rows; resumes after the last complete shard."""
        shapes = table_shapes(self.model.options, projected, len(rows))
        writers = {
            f"layer{number}": draft.writer(f"layer{number}.npy", *_on_disk(shape, self.config))
            for number, shape in enumerate(shapes)
        }
        done = writers["layer0"].rows
        tasks = [
            Task(
                "tables",
                f"rows.{some[0]:012d}",
                {"first": some[0], "last": some[-1] + 1, "projected": projected},
                reads,
            )
            for some in (rows[start : start + SHARD] for start in range(done, len(rows), SHARD))
        ]
        with Track(label, len(rows), "rows", done) as track:
            for path in spread(draft.shards, self.write_shard, tasks):
                made = load_arrays(path)
                for name, writer in writers.items():
                    writer.append(made[name])
                draft.commit()
                track.advance(len(made["layer0"]))
        return {"rows": len(rows)}

    @torch.inference_mode()
    def write_shard(self, first: int, last: int, projected: bool, path: Path) -> None:
        """Write the lines of some rows, as they are stored."""
        tables = lines_of(self.model, self.graphs, torch.arange(first, last), projected, self.device)
        made = {}
        for number, table in enumerate(tables):
            if self.quantizers:
                codes = self.quantizers[number].encode(table.flatten(0, -2).numpy())
                made[f"layer{number}"] = codes.reshape(*table.shape[:-1], -1)
            else:
                made[f"layer{number}"] = rounded_table(table.numpy(), self.config.dtype)
        save_arrays(path, made)


def open_cache(artifact: Artifact, model: GnnModel, store: Store, device: str) -> WindowCache | None:
    """The cache with its network; None if the run has no cache."""
    form = artifact.facts["form"]
    if form == "none":
        return None
    tensors = artifact.tensors(QUANTIZERS) if QUANTIZERS in artifact else {}
    parts = artifact.parts or (artifact,)  # older runs have the tables of their one segment here
    tables: list[Tensor | CodedTable | JoinedTable] = []
    for number in range(len(table_shapes(model.options, form == "projected", 1))):
        arrays = [part.array(f"layer{number}.npy") for part in parts]
        plain = [mapped(array.reshape(-1, array.shape[-1])).to(device) for array in arrays]
        if tensors:
            quantizer = Quantizer.from_tensors(tensors, f"layer{number}.").to(device)
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


@torch.inference_mode()
def choose_form(
    model: GnnModel, graphs: GraphBuilder, trial: Trial, config: CacheConfig, device: str
) -> dict[str, Any]:
    """The configured form; for `auto`, the fastest form on the trial's tokens that stays within the limit.

    Of forms that are about as fast as the fastest, the smallest is chosen.
    """
    if config.form != "auto":
        return {"form": config.form, "trials": []}
    place, tokens = torch.device(device), trial.context.document_BT.numel()

    def made(states: bool) -> Graph:
        return graphs(trial.context, trial.neighbours, states).to(place)

    graph = made(True)
    windows = graph.windows  # tables that hold only these windows, in their order
    own = replace(graph, windows=replace(windows, rows_U=torch.arange(len(windows.rows_U), device=place)))
    sizes: dict[str, int] = {"none": 0}
    work: dict[str, Callable[[], object]] = {"none": lambda: model(made(True))}
    for form in ("states",) if config.dtype == "pq" else ("states", "projected"):
        sizes[form] = cache_bytes(table_shapes(model.options, form == "projected", len(graphs.store)), config)
        tables = [table.flatten(0, -2) for table in make_tables(model, windows, form == "projected")]
        if config.dtype == "fp16":
            tables = [table.half() for table in tables]
        cache = WindowCache(model, graphs.store, form == "projected", tables)

        def score(cache: WindowCache = cache) -> None:
            made(False)
            model(own, cache=cache)

        work[form] = score
    seconds = _seconds(work)
    trials: list[dict[str, Any]] = [{"form": form, "bytes": sizes[form], "seconds": seconds[form]} for form in work]
    for tried in trials:
        speed = tokens / tried["seconds"]
        say(f"cache: tried {tried['form']} ({human_bytes(tried['bytes'])}): {speed:,.0f} tokens/s")
    fitting = [tried for tried in trials if tried["bytes"] <= config.limit_gb * 1e9]
    slowest = (1 + NOISE) * min(tried["seconds"] for tried in fitting)
    chosen = min((tried for tried in fitting if tried["seconds"] <= slowest), key=lambda tried: tried["bytes"])
    return {"form": chosen["form"], "trials": trials}


def _seconds(work: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The median time of each piece of work; they take turns, so that a slow moment affects all of them equally."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(1 + TRIAL_ROUNDS):
        for name, job in work.items():
            began = time.perf_counter()
            job()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - began)
        if number >= 3 and all(sum(each) >= TRIAL_SECONDS for each in times.values()):
            break
    return {name: statistics.median(each) for name, each in times.items()}


def lines_of(model: GnnModel, graphs: GraphBuilder, rows_U: Tensor, projected: bool, device: str) -> list[Tensor]:
    """The lines of these rows in every table."""
    windows = graphs.windows(rows_U)
    centre_U = windows.place_UW[:, graphs.left]
    tables = make_tables(model, windows.to(torch.device(device)), projected)
    return [
        (table if per_row(model.options, number) else table[centre_U.to(device)]).float().cpu()
        for number, table in enumerate(tables)
    ]


@torch.inference_mode()
def learn_quantizers(
    model: GnnModel, graphs: GraphBuilder, config: CacheConfig, seed: int, device: str, path: Path
) -> None:
    """Write one quantizer per table, learned from rows sampled from the whole store."""
    rows = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(len(graphs.store))[:TRAIN_ROWS]))
    say(f"cache: learning a code of {config.bytes} bytes per state from {len(rows):,} rows")
    tensors: dict[str, Tensor] = {}
    for number, table in enumerate(lines_of(model, graphs, rows, False, device)):
        sample = table.flatten(0, -2).numpy()
        tensors |= train_quantizer(sample, config.bytes, seed, "cache.bytes").tensors(f"layer{number}.")
    with writing(path):
        save_file(tensors, path)


def load_quantizers(folder: Path, model: GnnModel, config: CacheConfig) -> list[Quantizer]:
    """The quantizers that were learned, one per table; none where the tables are not coded."""
    if config.dtype != "pq":
        return []
    loaded = load_file(folder / QUANTIZERS)
    return [Quantizer.from_tensors(loaded, f"layer{n}.") for n in range(len(table_shapes(model.options, False, 1)))]


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
