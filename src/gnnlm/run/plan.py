"""What a config will make, and what that will need, before anything starts.

Sizes are counted from the config; times come from how fast this machine multiplies matrices, and are rough: right to a
factor of two or three.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gnnlm.config import SCRATCH, Config
from gnnlm.corpus.stream import SPLITS
from gnnlm.datastore.quantize import check_bytes
from gnnlm.errors import ConfigError

if TYPE_CHECKING:
    from gnnlm.gnn.options import GnnOptions
    from gnnlm.run import Run

EFFICIENCY = 0.5  # of a matrix product's speed that a whole model reaches
DISTINCT = 0.7  # of the rows that a batch retrieves
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
    head_parameters: int

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
        parameters, head = (sum(p.numel() for p in part.parameters()) for part in (model, model.head))
    else:
        lm = run.source_lm
        vocabulary, width, field = lm.vocab_size, lm.width, lm.receptive_field
        parameters, layers = lm.parameters, max(1, round(lm.parameters / (14 * lm.width**2)))  # about
        head = vocabulary * width
    with torch.device("meta"):
        options = resolve_options(config.gnn, width)
        gnn = GnnModel(options, SoftmaxHead(torch.empty(1, width)))
    count = sum(p.numel() for p in gnn.parameters())
    field = min(config.lm.window, field or config.lm.window)
    return Description(parameters, count, field, width, options.width, vocabulary, layers, head)


def _corpus_is_made(run: Run) -> bool:
    state = run.state(run.stages["corpus"])
    if state in ("stale", "damaged"):
        raise ConfigError(
            f"{run.path('corpus')} is {state}; make it again (gnnlm corpus, with --rebuild), or choose another run "
            "directory"
        )
    return state == "done"


def vocabulary_size(run: Run) -> int:
    """The size of a corpus's vocabulary: as it was made, or as it was published."""
    from gnnlm.corpus.benchmarks import BENCHMARKS

    corpus = run.config.corpus
    if _corpus_is_made(run):
        return int(run.artifact("corpus").facts["vocabulary"]["size"])
    if corpus.source is None or not corpus.is_benchmark or corpus.train is not None:
        raise ConfigError(
            "the vocabulary is not known before the corpus is made; make it first: gnnlm corpus, with this config"
        )
    return BENCHMARKS[corpus.source].vocabulary


@dataclass(frozen=True)
class Amount:
    """How much text a split has."""

    tokens: int
    documents: int

    @property
    def positions(self) -> int:
        return self.tokens + self.documents


def amounts(run: Run) -> dict[str, Amount]:
    """Of each split: as made, as published, or as limited."""
    from gnnlm.corpus.benchmarks import BENCHMARKS

    corpus = run.config.corpus
    if _corpus_is_made(run):
        facts = run.artifact("corpus").facts
        return {split: Amount(int(facts[split]["tokens"]), int(facts[split]["documents"])) for split in SPLITS}
    limits = {split: getattr(corpus, f"max_{split}_tokens") for split in SPLITS}
    if corpus.source is not None and corpus.is_benchmark and corpus.train is None:
        benchmark = BENCHMARKS[corpus.source]
        documents = benchmark.sentences or (0, 0, 0)  # articles are too few to count
        return {
            split: Amount(min(tokens, limits[split] or tokens), some)
            for split, tokens, some in zip(SPLITS, benchmark.tokens, documents, strict=True)
        }
    if any(limit is None for limit in limits.values()):
        raise ConfigError(
            "how much text there is is not known before the corpus is made; make it first: gnnlm corpus, with the same "
            "config"
        )
    return {split: Amount(int(limits[split]), 0) for split in SPLITS}


@dataclass(frozen=True)
class Need:
    """What one stage needs: bytes on disk, bytes in memory, seconds on this machine."""

    disk: float
    memory: float
    seconds: float


@dataclass(frozen=True)
class Speed:
    """Multiplications and additions a second: of the device in both precisions, and of the processor FAISS runs on."""

    fp32: float
    bf16: float
    processor: float

    @classmethod
    def measured(cls, device: str = "auto", seconds: float = 0.3) -> Speed:
        from gnnlm.lm.load import usable_device

        name = str(usable_device(device))
        fp32 = matrix_speed(name, "float32", seconds)
        processor = fp32 if name == "cpu" else matrix_speed("cpu", "float32", seconds)
        return cls(fp32, matrix_speed(name, "bfloat16", seconds), processor)

    def of(self, precision: str) -> float:
        """What a whole model reaches."""
        return EFFICIENCY * (self.bf16 if precision == "bf16" else self.fp32)


def matrix_speed(device: str, dtype: str, seconds: float) -> float:
    """Multiplications and additions a second in large matrix products."""
    import torch

    size = 1024 if device == "cpu" else 4096
    matrix = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    count, began = 0, 0.0
    while not count or time.perf_counter() - began < seconds:
        product = matrix
        for _ in range(4):
            product = matrix @ matrix
        product[0, 0].item()  # waits for all of them
        if began:
            count += 4
        else:  # the first round warms up
            began = time.perf_counter()
    return count * 2 * size**3 / (time.perf_counter() - began)


def plan(config: Config, about: Description, text: dict[str, Amount], speed: Speed) -> dict[str, Need]:
    """Every stage's need."""
    total = sum(amount.positions for amount in text.values())
    rows = text["train"].positions
    needs = {"corpus": Need(total * 12.0, total * 8.0, total / 5e5)}
    if config.lm.is_trained:
        needs["lm"] = _lm_need(config, about, text["train"].tokens, speed)
    needs["encode"] = _encode_need(config, about, text, speed)
    if config.codec.kind == "pq":
        check_bytes(about.width, config.codec.bytes, "codec.bytes")
        needs["codec"] = Need(rows * config.codec.bytes, 4.0 * config.codec.train_rows * about.width, rows / 2e4)
    needs["index"] = _index_need(config, rows, about.width, EFFICIENCY * speed.processor)
    needs["search"] = _search_need(config, about, text, needs["index"].disk, EFFICIENCY * speed.processor)
    needs.update(_gnn_needs(config, about, text, speed))
    return {name: replace(need, memory=need.memory + PROCESS) for name, need in needs.items()}


def _lm_need(config: Config, about: Description, train: int, speed: Speed) -> Need:
    weights = 4.0 * about.parameters
    fit, tuning = config.lm.train, config.lm.finetune
    if config.lm.model == SCRATCH:
        read, tokens, precision = fit.steps * fit.batch_tokens * fit.accumulate, fit.batch_tokens, fit.precision
        readings = 0.0
    else:
        read, tokens, precision = round(tuning.epochs * train), tuning.batch_tokens, tuning.precision
        readings = 2.0 * train * about.width if tuning.unread == "first-reading" else 0.0
    activations = tokens * (80.0 * about.width * about.layers + 12.0 * min(about.vocabulary, 50_000))
    seconds = 6 * about.parameters * read / speed.of(precision)
    return Need(4 * weights + readings, 4 * weights + activations, seconds)


def _encode_need(config: Config, about: Description, text: dict[str, Amount], speed: Speed) -> Need:
    total = sum(amount.positions for amount in text.values())
    item = (2 if config.store.dtype == "fp16" else 4) * (2 if config.store.key == "ffn_input" else 1)
    train, window = text["train"], config.lm.window
    short = not config.lm.continuous and train.documents and train.tokens / train.documents < window
    repeated = 1.0 if short else window / (window - config.lm.context)  # a window's context is read again
    memory = 8.0 * about.parameters + 40.0 * config.lm.batch_tokens * about.width + 24.0 * train.positions
    seconds = 2 * about.parameters * total * repeated / speed.of(config.lm.dtype)
    return Need(total * about.width * item + 4.0 * about.head_parameters, memory, seconds)


def _index_need(config: Config, rows: int, width: int, flops: float) -> Need:
    from gnnlm.retrieval.index import clusters_of, training_rows

    if config.index.kind == "exact":
        return Need(rows * width * 4.0, rows * width * 4.0, rows / 1e5)
    if config.index.kind == "ivfpq":
        check_bytes(width, config.index.bytes, "index.bytes")
    clusters = clusters_of(config.index, rows)
    code = config.index.bytes if config.index.kind == "ivfpq" else 4.0 * width
    size = rows * (code + 8.0) + 4.0 * clusters * width
    sample = training_rows(clusters, rows)
    compared = 25.0 * clusters * sample + _found(config, rows) * rows  # 25 rounds of k-means; then each row its cluster
    return Need(size, size + 4.0 * sample * width, 2 * width * compared / flops)


def _search_need(config: Config, about: Description, text: dict[str, Amount], index: float, flops: float) -> Need:
    train, held = text["train"].positions, text["valid"].positions + text["test"].positions
    asked = min(train, config.search.max_train or train)
    table = asked * config.search.graph_k + held * config.search.k
    compared = train if config.index.kind == "exact" else _found(config, train) + _probed(config, train)
    return Need(table * 8.0, index, (asked + held) * 2 * compared * about.width / flops)


def _found(config: Config, rows: int) -> float:
    """Clusters that a key is compared with to find its own: all, or those on the way through a graph."""
    from gnnlm.retrieval.index import MANY_CLUSTERS, clusters_of

    clusters = clusters_of(config.index, rows)
    return clusters if clusters <= MANY_CLUSTERS else 2_000.0


def _probed(config: Config, rows: int) -> float:
    """Rows in the clusters that a query looks into."""
    from gnnlm.retrieval.index import clusters_of

    return rows * min(1.0, config.index.probes / clusters_of(config.index, rows))


def _gnn_needs(config: Config, about: Description, text: dict[str, Amount], speed: Speed) -> dict[str, Need]:
    from gnnlm.gnn.options import resolve_options

    options, train = resolve_options(config.gnn, about.width), config.train
    rows, held = text["train"].positions, text["valid"].positions + text["test"].positions
    gnn, head = 4.0 * about.gnn_parameters, 4.0 * about.head_parameters
    tokens = train.block * train.batch_blocks
    a_step = tokens * train.accumulate
    read = a_step * sum(phase.steps for phase in train.curriculum)
    edges = a_step * sum(phase.steps * phase.k for phase in train.curriculum)
    width = options.width + (options.base_width if options.token_features else 0)
    an_edge = 4.0 * options.layers * options.window * options.heads * width  # scored and averaged in the sources' space
    updates = 14.0 * (options.layers - 1) * options.window * options.width**2 if options.neighbour_updates else 0.0
    dense = 2.0 * about.gnn_parameters + 2.0 * about.head_parameters
    learning = 3 * (dense * read + (an_edge + DISTINCT * updates) * edges)
    most = DISTINCT * tokens * max(phase.k for phase in train.curriculum)
    kept = 4.0 * options.width * options.window * _kept_states(options, train.checkpoint)
    k = config.eval.graph_k or config.search.graph_k
    cached = _cache_bytes(config, options, rows)
    scoring = held * (dense + k * (an_edge + (0.0 if cached else DISTINCT * updates)))
    rows_read = 4.0 * config.eval.block * k * options.window * options.width
    memory = 4 * gnn + 2 * head + most * kept + 32.0 * rows + 2e8
    return {
        "train": Need(4 * gnn, memory, learning / speed.of(train.precision)),
        "cache": Need(cached, head, rows * (gnn / 4 + updates) / speed.of("fp32") if cached else 0.0),
        "tune, eval": Need(held * 40.0, 2 * head + rows_read + 32.0 * rows + 3e8, scoring / speed.of("fp32")),
    }


def _kept_states(options: GnnOptions, checkpoint: bool) -> int:
    """States of a window slot that learning keeps for the backward pass."""
    if not options.neighbour_updates:
        return 2  # as it came, and normed
    if checkpoint:
        return 2 + 3 * (options.layers - 1)  # and behind each update: by chunks, joined, and normed
    return 6 * options.layers


def _cache_bytes(config: Config, options: GnnOptions, rows: int) -> float:
    """The cache that is asked for; for `auto` the largest within its limit."""
    from gnnlm.predict.cache import cache_bytes, table_shapes

    if config.cache.form == "none":
        return 0.0
    forms = ("states", "projected") if config.cache.form == "auto" else (config.cache.form,)
    sizes = [cache_bytes(table_shapes(options, form == "projected", rows), config.cache) for form in forms]
    limit = config.cache.limit_gb * 1e9 if config.cache.form == "auto" else float("inf")
    return float(max((size for size in sizes if size <= limit), default=0))


def table_of(needs: dict[str, Need]) -> dict[str, Any]:
    """The plan as plain values, with totals: disk adds up, memory is the largest, time adds up."""
    stages = {name: dict(vars(need)) for name, need in needs.items()}
    return {
        "stages": stages,
        "disk": sum(need.disk for need in needs.values()),
        "memory": max(need.memory for need in needs.values()),
        "seconds": sum(need.seconds for need in needs.values()),
    }
