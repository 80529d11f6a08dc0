"""The cache stage: what the trained network reads of every row is computed once, so that scoring need not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft, draft_path
from gnnlm.config import Config
from gnnlm.engine import Work
from gnnlm.stage import NO_NETWORK, BuildContext, InputFacts, SegmentSource, Stage, section_inputs

if TYPE_CHECKING:
    from gnnlm.datastore.store import Segment
    from gnnlm.predict.window_cache import WindowCache
    from gnnlm.run.snapshot import Snapshot


class CacheStage(Stage):
    name = "cache"
    folder = "cache"
    parents = ("encode", "codec", "search", "train")
    help = "Precompute the trained network's neighbour states, so that scoring need not compute them."
    part = "cache"
    tasks = ("quantizers", "tables")

    def is_in(self, config: Config) -> bool:
        return config.gnn.layers > 0

    def absence(self, config: Config) -> str:
        return NO_NETWORK.format(self.name)

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        return {**section_inputs(config.cache, "cache"), "graph k": config.graph_k, "seed": config.seed}

    def check(self, config: Config, width: int, rows: int) -> None:
        from gnnlm.datastore.quantize import check_bytes
        from gnnlm.gnn.gnn_options import resolve_options

        if config.cache.dtype == "pq":
            check_bytes(resolve_options(config.gnn, width).width, config.cache.bytes, "cache.bytes")

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        import torch

        from gnnlm.predict.cache_build import build_cache
        from gnnlm.predict.cache_form import TRIAL_TOKENS, Trial

        config, snapshot = context.config, context.snapshot
        assert snapshot.gnn is not None
        valid = snapshot.searched("valid")
        positions = torch.arange(min(TRIAL_TOKENS, len(valid.text)))[None]
        trial = Trial(valid.context(positions), valid.table.at(positions, config.graph_k))
        states = [part.fingerprint for part in snapshot.artifact("encode").parts]
        codec = snapshot.artifact("codec")
        coded = codec.facts["kind"] != "fp16"
        codes = [part.fingerprint for part in codec.parts] if coded else [None] * len(states)
        made_from = [_rows_inputs(snapshot, *pair) for pair in zip(states, codes, strict=True)]
        return build_cache(
            draft,
            snapshot.gnn,
            snapshot.graphs,
            trial,
            config.cache,
            config.seed,
            snapshot.device,
            made_from,
            context.spread,
        )

    def work(self, snapshot: Snapshot, inputs: Mapping[str, Any], kind: str) -> Work:
        from gnnlm.predict.cache_build import learn_quantizers
        from gnnlm.predict.window_cache import QUANTIZERS, TableMaker, load_quantizers, tables_work

        config, gnn = snapshot.config, snapshot.gnn
        assert gnn is not None
        if kind == "quantizers":
            return partial(learn_quantizers, gnn, snapshot.graphs, config.cache, config.seed, snapshot.device)
        folder, dtype = draft_path(snapshot.path(self.name)), config.cache.dtype
        quantizers = load_quantizers(folder / QUANTIZERS) if dtype == "pq" else []
        return tables_work(TableMaker(gnn, dtype, quantizers, snapshot.device), snapshot.graphs)

    def part_inputs(self, snapshot: Snapshot, source: SegmentSource) -> dict[str, Any] | None:
        from gnnlm.predict.cache_build import tables_inputs
        from gnnlm.predict.window_cache import QUANTIZERS

        cache = snapshot.trained(self.name)
        form = cache.facts["form"]
        if form == "none":
            return None
        codes = source.parts["codes"].fingerprint if "codes" in source.parts else None
        made_from = _rows_inputs(snapshot, source.parts["states"].fingerprint, codes)
        learned = cache.manifest.files[QUANTIZERS].sha256 if QUANTIZERS in cache else None
        return tables_inputs(made_from, form, cache.facts["dtype"], learned)

    def write_part(self, snapshot: Snapshot, source: SegmentSource, draft: Draft) -> Mapping[str, Any]:
        from gnnlm.datastore.store import Store
        from gnnlm.predict.graphs import GraphBuilder
        from gnnlm.predict.window_cache import QUANTIZERS, SegmentTables, TableMaker, quantizers_in

        config, cache, gnn = snapshot.config, snapshot.trained(self.name), snapshot.gnn
        assert gnn is not None
        quantizers = quantizers_in(cache.tensors(QUANTIZERS)) if QUANTIZERS in cache else []
        graphs = GraphBuilder(Store([_stored(snapshot, source)]), config.gnn.left, config.gnn.right)
        maker = TableMaker(gnn, config.cache.dtype, quantizers, snapshot.device)
        tables = SegmentTables(maker, graphs, range(len(source.stream)), cache.facts["form"] == "projected")
        tables.write(draft, "cache", "rows")
        return {"rows": tables.rows}

    def load(self, snapshot: Snapshot) -> WindowCache | None:
        """Open the cached neighbour states of the trained network; None if there is no cache."""
        from gnnlm.predict.window_cache import open_cache

        if snapshot.gnn is None:
            return None
        return open_cache(snapshot.artifact(self.name), snapshot.gnn, snapshot.store, snapshot.device)

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        if not any(name.endswith(".safetensors") for name in artifact.manifest.files):
            return ""
        return "the codebooks of the cache" + (", learned again" if refitted else "")


def _rows_inputs(snapshot: Snapshot, states: str, codes: str | None) -> dict[str, Any]:
    """Return which network and which states the tables of a segment are made from."""
    config = snapshot.config
    return {
        "network": snapshot.trained("train").fingerprint,
        "softmax": snapshot.trained("encode").manifest.files["head.safetensors"].sha256,
        "bytes": config.cache.bytes if config.cache.dtype == "pq" else None,
        "states": states,
        "codes": codes,
    }


def _stored(snapshot: Snapshot, source: SegmentSource) -> Segment:
    """Return a segment as the graph network reads it."""
    from gnnlm.datastore.codec import QUANTIZER
    from gnnlm.datastore.quantize import CodedTable, Quantizer
    from gnnlm.datastore.store import Segment, mapped

    segment = Segment.over(source.stream, source.parts["states"].array("states.npy"))
    if "codes" not in source.parts:
        return segment
    quantizer = Quantizer.from_tensors(snapshot.trained("codec").tensors(QUANTIZER)).to(snapshot.device)
    return segment.coded(CodedTable(mapped(source.parts["codes"].array("codes.npy")), quantizer))


CACHE = CacheStage()
