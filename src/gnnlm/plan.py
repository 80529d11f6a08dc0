"""What a config will make, and what that will need, before anything starts.

Sizes are counted from the config; times come from how fast this machine multiplies matrices, and are rough.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gnnlm.config import SCRATCH, Config
from gnnlm.corpus.stream import SPLITS
from gnnlm.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from gnnlm.gnn.options import GnnOptions
    from gnnlm.pipeline import Run

EFFICIENCY = 0.5  # of a matrix product's speed that a whole model reaches
PROCESS = 6e8  # bytes that Python, torch and FAISS take themselves


@dataclass(frozen=True)
class Description:
    """A base model and the graph network on it, by their sizes."""

    parameters: int
    gnn_parameters: int
    receptive_field: int
    width: int
    gnn_width: int
    vocabulary: int
    layers: int

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


def describe(run: Run) -> Description:
    """Count parameters without making any where the model is one of ours."""
    import torch

    from gnnlm.gnn.model import GnnModel
    from gnnlm.gnn.options import resolve_options
    from gnnlm.lm.architecture import build_model
    from gnnlm.lm.head import SoftmaxHead

    config = run.config
    if config.lm.model == SCRATCH:
        vocabulary = vocabulary_size(run)
        with torch.device("meta"):
            model = build_model(config.lm.architecture, vocabulary)
        width, field, layers = model.options.width, model.receptive_field, model.options.layers
        parameters = sum(p.numel() for p in model.parameters())
    else:
        lm = run.source_lm
        vocabulary, width, field = lm.vocab_size, lm.width, lm.receptive_field
        parameters, layers = lm.parameters, max(1, round(lm.parameters / (14 * lm.width**2)))  # about
    with torch.device("meta"):
        options = resolve_options(config.gnn, width)
        gnn = GnnModel(options, SoftmaxHead(torch.empty(1, width)))
    count = sum(p.numel() for p in gnn.parameters())
    return Description(
        parameters, count, min(config.lm.window, field or config.lm.window), width, options.width, vocabulary, layers
    )


def vocabulary_size(run: Run) -> int:
    """The size of a corpus's vocabulary: as it was made, or as it was published."""
    from gnnlm.corpus.benchmarks import BENCHMARKS

    try:
        return int(run.artifact("corpus").facts["vocabulary"]["size"])
    except ArtifactError:
        source = run.config.corpus.source
        corpus = run.config.corpus
        if source is None or not corpus.is_benchmark or corpus.train is not None:
            raise ConfigError(
                "the vocabulary is not known before the corpus is made; make it first: gnnlm corpus, with this config"
            ) from None
        return BENCHMARKS[source].vocabulary


def split_tokens(run: Run) -> dict[str, int]:
    """Tokens of each split: as made, as published, or as limited."""
    from gnnlm.corpus.benchmarks import BENCHMARKS

    corpus = run.config.corpus
    try:
        facts = run.artifact("corpus").facts
        return {split: int(facts[split]["tokens"]) for split in SPLITS}
    except ArtifactError:
        pass
    limits = {split: getattr(corpus, f"max_{split}_tokens") for split in SPLITS}
    if corpus.source is not None and corpus.is_benchmark and corpus.train is None:
        benchmark = BENCHMARKS[corpus.source]
        pairs = zip(SPLITS, benchmark.tokens, strict=True)
        return {split: min(tokens, limits[split] or tokens) for split, tokens in pairs}
    if any(limit is None for limit in limits.values()):
        raise ConfigError(
            "how much text there is is not known before the corpus is made; make it first: gnnlm corpus, with the same "
            "config"
        )
    return {split: int(limits[split]) for split in SPLITS}


@dataclass(frozen=True)
class Need:
    """What one stage needs: bytes on disk, bytes in memory, seconds on this machine."""

    disk: float
    memory: float
    seconds: float


def matrix_speed(name: str = "auto", seconds: float = 0.5) -> float:
    """Multiplications and additions a second in large float32 matrix products, on the device that would be used."""
    import torch

    from gnnlm.lm.load import usable_device

    device = usable_device(name)
    matrix = torch.randn(1024, 1024, device=device)
    for _ in range(3):
        matrix @ matrix
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        out = matrix @ matrix
        out[0, 0].item()
        count += 1
    return count * 2 * 1024**3 / (time.perf_counter() - began)


def plan(config: Config, about: Description, tokens: dict[str, int], speed: float) -> dict[str, Need]:
    """Every stage's need."""
    from gnnlm.gnn.options import resolve_options

    flops = EFFICIENCY * speed
    total, train, held = sum(tokens.values()), tokens["train"], tokens["valid"] + tokens["test"]
    weights, gnn = 4.0 * about.parameters, 4.0 * about.gnn_parameters
    item = 2 if config.store.dtype == "fp16" else 4
    repeated = config.lm.window / (config.lm.window - config.lm.context)  # a window's context is read again
    needs = {"corpus": Need(total * 12.0, total * 8.0, total / 5e5)}
    if config.lm.is_trained:
        fit = config.lm.train if config.lm.model == SCRATCH else config.lm.finetune
        read = (
            config.lm.train.steps * fit.batch_tokens * fit.accumulate
            if config.lm.model == SCRATCH
            else config.lm.finetune.epochs * train
        )
        activations = fit.batch_tokens * (80.0 * about.width * about.layers + 12.0 * min(about.vocabulary, 50_000))
        first = config.lm.finetune.kind != "none" and config.lm.finetune.unread == "first-reading"
        readings = 2.0 * train * about.width if first else 0.0
        needs["lm"] = Need(4 * weights + readings, 4 * weights + activations, 6 * about.parameters * read / flops)
    keys = 2 if config.store.key == "ffn_input" else 1
    head = 4.0 * about.vocabulary * about.width
    passing = 40.0 * config.lm.batch_tokens * about.width + 24.0 * train
    needs["encode"] = Need(
        total * about.width * item * keys + head,
        2 * weights + passing,
        2 * about.parameters * total * repeated / flops,
    )
    if config.codec.kind == "pq":
        needs["codec"] = Need(train * config.codec.bytes, 4.0 * config.codec.train_rows * about.width, train / 2e4)
    needs["index"] = _index_need(config, train, about.width, flops)
    probed = _probed(config, train)
    asked = min(train, config.search.max_train or train)
    rows = asked * config.search.graph_k + held * config.search.k
    needs["search"] = Need(rows * 8.0, needs["index"].disk, (asked + held) * 2 * probed * about.width / flops)
    steps = sum(phase.steps * phase.k for phase in config.train.curriculum)
    block = config.train.block * config.train.batch_blocks
    per_edge = 12.0 * config.gnn.layers * (config.gnn.left + config.gnn.right + 1) * about.gnn_width * 16
    dense = 6.0 * about.gnn_parameters * block * sum(phase.steps for phase in config.train.curriculum)
    options = resolve_options(config.gnn, about.width)
    k = config.eval.graph_k or config.search.graph_k
    most = block * max(phase.k for phase in config.train.curriculum) / 2  # rows, about half of them distinct
    kept = 4.0 * about.gnn_width * options.window * (6 * options.layers if options.neighbour_updates else 2)
    needs["train"] = Need(4 * gnn, 4 * gnn + 2 * head + most * kept + 2e8, (dense + per_edge * block * steps) / flops)
    needs["cache"] = Need(_cache_bytes(config, options, train), head, train * about.gnn_parameters / flops)
    scoring = held * (4.0 * about.gnn_parameters + per_edge * k / 3 + 4.0 * about.vocabulary * about.width)
    rows_read = 4.0 * config.eval.block * k * options.window * about.gnn_width
    needs["tune, eval"] = Need(held * 40.0, 2 * head + rows_read + 3e8, scoring / flops)
    return {name: replace(need, memory=need.memory + PROCESS) for name, need in needs.items()}


def _cache_bytes(config: Config, options: GnnOptions, rows: int) -> float:
    """The cache that is asked for; for `auto` the largest within its limit."""
    from gnnlm.predict.cache import cache_bytes, table_shapes

    if config.cache.form == "none":
        return 0.0
    forms = ("states", "projected") if config.cache.form == "auto" else (config.cache.form,)
    sizes = [cache_bytes(table_shapes(options, form == "projected", rows), config.cache) for form in forms]
    limit = config.cache.limit_gb * 1e9 if config.cache.form == "auto" else float("inf")
    return float(max((size for size in sizes if size <= limit), default=0))


def _probed(config: Config, rows: int) -> float:
    """Rows that a query is compared with."""
    from gnnlm.retrieval.index import clusters_of

    if config.index.kind == "exact":
        return rows
    clusters = clusters_of(config.index, rows)
    return clusters + rows * min(1.0, config.index.probes / clusters)


def _index_need(config: Config, rows: int, width: int, flops: float) -> Need:
    from gnnlm.retrieval.index import clusters_of

    if config.index.kind == "exact":
        return Need(rows * width * 4.0, rows * width * 4.0, rows / 1e5)
    clusters = clusters_of(config.index, rows)
    size = rows * ((config.index.bytes if config.index.kind == "ivfpq" else 4.0 * width) + 8.0)
    sample = min(rows, max(262_144, 40 * clusters))
    return Need(size, size + 4.0 * sample * width, 2 * width * clusters * (25.0 * sample + rows) / flops)


def table_of(needs: dict[str, Need]) -> dict[str, Any]:
    """The plan as plain values, with totals: disk adds up, memory is the largest, time adds up."""
    stages = {name: dict(vars(need)) for name, need in needs.items()}
    return {
        "stages": stages,
        "disk": sum(need.disk for need in needs.values()),
        "memory": max(need.memory for need in needs.values()),
        "seconds": sum(need.seconds for need in needs.values()),
    }
