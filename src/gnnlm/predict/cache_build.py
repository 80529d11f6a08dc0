"""Building the cache: the tables of the chosen form, of every segment of the store."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from gnnlm.artifact import Artifact, Draft, disk, file_digest, human_bytes, writing
from gnnlm.config import CacheConfig
from gnnlm.datastore.quantize import train_quantizer
from gnnlm.datastore.row_shards import ShardTasks
from gnnlm.engine import FileTask, Spread, here
from gnnlm.gnn.model import GnnModel
from gnnlm.layout import part_name
from gnnlm.predict.cache_form import Trial, choose_form
from gnnlm.predict.graphs import GraphBuilder
from gnnlm.predict.window_cache import (
    QUANTIZERS,
    SegmentTables,
    TableMaker,
    cache_bytes,
    lines_of,
    load_quantizers,
    table_shapes,
)
from gnnlm.progress import numbered, say

PART = "cache"
TRAIN_ROWS = 16_384  # rows whose states a quantizer is learned from


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
        form, trials = choose_form(model, graphs, trial, config, device)
        draft.notes.update(form=form, trials=[asdict(each) for each in trials])
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
        for path in spread.files(draft.shards, learn, [FileTask("quantizers", QUANTIZERS)]):
            disk.rename(path, draft.file(QUANTIZERS))
            draft.commit(QUANTIZERS)
    elif not draft.resumed:
        draft.commit()
    quantizers = load_quantizers(draft.folder / QUANTIZERS) if config.dtype == "pq" else []
    maker = TableMaker(model, config.dtype, quantizers, device)
    learned = file_digest(draft.folder / QUANTIZERS) if quantizers else None
    inputs = [tables_inputs(each, form, config.dtype, learned) for each in made_from]
    names = [part_name(number, PART) for number in range(len(inputs))]
    sizes = [
        cache_bytes(table_shapes(options, form == "projected", len(part)), config) for part in graphs.store.segments
    ]
    draft.require_space(dict(zip(names, zip(inputs, sizes, strict=True), strict=True)), 0, "the cache")
    reads = (f"{draft.folder.name}/{QUANTIZERS}",) if quantizers else ()
    spans = [range(first, last) for first, last in itertools.pairwise(graphs.store.bases.tolist())]

    def write(part: Draft, number: int) -> dict[str, Any]:
        tables = SegmentTables(maker, graphs, spans[number], form == "projected")
        where = {"segment": number, "projected": tables.projected}
        label = numbered("cache", number, len(names))
        tables.write(part, label, "rows", tasks=ShardTasks(spread, "tables", where, reads))
        return {"rows": tables.rows}

    for number, name in enumerate(names):
        draft.part(name, inputs[number], partial(write, number=number))
    return draft.finish({**facts, "bytes": size})


def tables_inputs(made_from: Mapping[str, Any], form: str, dtype: str, quantizers: str | None) -> dict[str, Any]:
    """Return the inputs of a segment's tables; `quantizers` is the checksum of their file, if there is one."""
    return {**made_from, "form": form, "dtype": dtype, "quantizers": quantizers}


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
