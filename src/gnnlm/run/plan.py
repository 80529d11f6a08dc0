"""Estimates of the disk, memory and time that a run still needs.

Sizes are computed from the config. Times are computed from the measured speed of matrix products on this machine, and
are accurate to a factor of two or three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gnnlm.config import SCRATCH, Config
from gnnlm.corpus.stream import SPLITS
from gnnlm.datastore.quantize import check_bytes
from gnnlm.errors import ConfigError
from gnnlm.run.speed import EFFICIENCY, Speed

if TYPE_CHECKING:
    from gnnlm.gnn.options import GnnOptions
    from gnnlm.run import Run

DISTINCT = 0.7  # share of the retrieved rows of a batch that are distinct
PROCESS = 6e8  # memory that Python, torch and FAISS need themselves, in bytes


@dataclass(frozen=True)
class Description:
    """The sizes of a base model and of its graph network."""

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
    """Count parameters; a model that is still to be trained is not allocated for this."""
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
        lm = run.parts.source_lm
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
            f"{run.path('corpus')} is {state}; rebuild it (gnnlm corpus --rebuild), or choose another run directory"
        )
    return state == "done"


def vocabulary_size(run: Run) -> int:
    """The size of a corpus's vocabulary: as built, or as published."""
    from gnnlm.corpus.benchmarks import BENCHMARKS

    corpus = run.config.corpus
    if _corpus_is_made(run):
        return int(run.artifact("corpus").facts["vocabulary"]["size"])
    if corpus.source is None or not corpus.is_benchmark or corpus.train is not None:
        raise ConfigError(
            "the vocabulary is not known before the corpus is built; build it first: gnnlm corpus, with this config"
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
    """How much text each split has: as built, as published, or as limited."""
    from gnnlm.corpus.benchmarks import BENCHMARKS

    corpus = run.config.corpus
    if _corpus_is_made(run):
        facts = run.artifact("corpus").facts
        return {split: Amount(int(facts[split]["tokens"]), int(facts[split]["documents"])) for split in SPLITS}
    limits = {split: getattr(corpus, f"max_{split}_tokens") for split in SPLITS}
    if corpus.source is not None and corpus.is_benchmark and corpus.train is None:
        benchmark = BENCHMARKS[corpus.source]
        documents = benchmark.sentences or (0, 0, 0)  # there are too few articles to matter
        return {
            split: Amount(min(tokens, limits[split] or tokens), some)
            for split, tokens, some in zip(SPLITS, benchmark.tokens, documents, strict=True)
        }
    if any(limit is None for limit in limits.values()):
        raise ConfigError(
            "the amount of text is not known before the corpus is built; build it first: gnnlm corpus, with this config"
        )
    return {split: Amount(int(limits[split]), 0) for split in SPLITS}


@dataclass(frozen=True)
class Need:
    """What a stage needs: bytes on disk, bytes in memory, seconds on this machine."""

    disk: float
    memory: float
    seconds: float


def plan(config: Config, about: Description, text: dict[str, Amount], speed: Speed) -> dict[str, Need]:
    """What each stage needs."""
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
    if config.eval.context_retrieval.enabled:
        needs["passages"] = _passages_need(config, about, text, speed)
        needs["eval"] = needs.pop("eval")  # the last stage
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
    from gnnlm.retrieval.faiss_index import training_rows

    if config.index.kind == "exact":
        return Need(rows * width * 4.0, rows * width * 4.0, rows / 1e5)
    if config.index.kind == "ivfpq":
        check_bytes(width, config.index.bytes, "index.bytes")
    clusters = config.index.clusters_of(rows)
    code = config.index.bytes if config.index.kind == "ivfpq" else 4.0 * width
    size = rows * (code + 8.0) + 4.0 * clusters * width
    sample = training_rows(clusters, rows)
    compared = (
        25.0 * clusters * sample + _found(config, rows) * rows
    )  # 25 rounds of k-means; then each row is assigned to a cluster
    return Need(size, size + 4.0 * sample * width, 2 * width * compared / flops)


def _search_need(config: Config, about: Description, text: dict[str, Amount], index: float, flops: float) -> Need:
    train, held = text["train"].positions, text["valid"].positions + text["test"].positions
    asked = min(train, config.search.max_train or train)
    table = asked * config.search.graph_k + held * config.search.k
    compared = train if config.index.kind == "exact" else _found(config, train) + _probed(config, train)
    return Need(table * 8.0, index, (asked + held) * 2 * compared * about.width / flops)


def _found(config: Config, rows: int) -> float:
    """How many clusters a key is compared with to find its own: all, or those on a path through an HNSW graph."""
    from gnnlm.retrieval.faiss_index import MANY_CLUSTERS

    clusters = config.index.clusters_of(rows)
    return clusters if clusters <= MANY_CLUSTERS else 2_000.0


def _probed(config: Config, rows: int) -> float:
    """How many rows are in the clusters that a query searches."""
    return rows * min(1.0, config.index.probes / config.index.clusters_of(rows))


def _gnn_needs(config: Config, about: Description, text: dict[str, Amount], speed: Speed) -> dict[str, Need]:
    from gnnlm.gnn.options import resolve_options

    options, train = resolve_options(config.gnn, about.width), config.train
    rows = text["train"].positions
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
    scoring = (dense + k * (an_edge + (0.0 if cached else DISTINCT * updates))) / speed.of("fp32")  # seconds a position
    rows_read = 4.0 * config.eval.block * k * options.window * options.width
    memory = 4 * gnn + 2 * head + most * kept + 32.0 * rows + 2e8
    scoring_memory = 2 * head + rows_read + 32.0 * rows + 3e8
    return {
        "train": Need(4 * gnn, memory, learning / speed.of(train.precision)),
        "cache": Need(cached, head, rows * (gnn / 4 + updates) / speed.of("fp32") if cached else 0.0),
        "tune": Need(0.0, scoring_memory, scoring * text["valid"].positions),
        "eval": Need(text["test"].positions * 40.0, scoring_memory, scoring * text["test"].positions),
    }


def _passages_need(config: Config, about: Description, text: dict[str, Amount], speed: Speed) -> Need:
    """At most: consecutive lookups that find the same passages are read once, and the chosen setting may cost less."""
    from gnnlm.evaluate.passages import Setting, first_settings, other_queries, other_strides

    wanted = config.eval.context_retrieval
    largest = Setting(max(wanted.counts), max(wanted.lengths), wanted.queries[0], max(wanted.strides))

    def read(setting: Setting, split: str, limit: int) -> float:
        amount, passages = text[split], setting.count * setting.length
        one = amount.tokens / (1 if config.lm.continuous else max(1, amount.documents))
        return min(limit, amount.tokens) / setting.stride * (passages + min(config.lm.window - passages, one / 2))

    strides = other_strides(largest, wanted)
    tried = first_settings(wanted) + other_queries(largest, wanted) + strides
    chosen = strides[-1] if strides else largest  # the one that costs most
    tokens = sum(read(setting, "valid", wanted.tune_tokens) for setting in tried) + read(chosen, "test", wanted.tokens)
    kept = min(wanted.tune_tokens, text["valid"].tokens) + min(wanted.tokens, text["test"].tokens)
    batch = max(config.lm.batch_tokens, config.lm.window)
    memory = 8.0 * about.parameters + 40.0 * batch * about.width + 100.0 * text["train"].positions
    item = (2 if config.store.dtype == "fp16" else 4) * (2 if config.store.key == "ffn_input" else 1)
    return Need(kept * about.width * item, memory, 2 * about.parameters * tokens / speed.of(config.lm.dtype))


def _kept_states(options: GnnOptions, checkpoint: bool) -> int:
    """How many states of a window slot are kept for the backward pass."""
    if not options.neighbour_updates:
        return 2  # the state itself, and normed
    if checkpoint:
        return 2 + 3 * (options.layers - 1)  # and after each update: in chunks, joined, and normed
    return 6 * options.layers


def _cache_bytes(config: Config, options: GnnOptions, rows: int) -> float:
    """The size of the cache that the config names; for `auto`, of the largest within the limit."""
    from gnnlm.predict.cache import cache_bytes, table_shapes

    if config.cache.form == "none":
        return 0.0
    forms = ("states", "projected") if config.cache.form == "auto" else (config.cache.form,)
    sizes = [cache_bytes(table_shapes(options, form == "projected", rows), config.cache) for form in forms]
    limit = config.cache.limit_gb * 1e9 if config.cache.form == "auto" else float("inf")
    return float(max((size for size in sizes if size <= limit), default=0))


def done_stages(run: Run) -> dict[str, int]:
    """The stages that are done, with their bytes on disk."""
    return {
        name: sum(file.stat().st_size for file in run.path(name).iterdir())
        for name, stage in run.stages.items()
        if run.state(stage) == "done"
    }


def table_of(needs: dict[str, Need], done: dict[str, int]) -> dict[str, Any]:
    """The plan as plain values: what each stage still needs, and the totals; a finished stage needs nothing more.

    Values are rounded as the table shows them before they are added, so that the totals match the rows shown.
    """
    stages = {}
    for name, need in needs.items():
        if name in done:
            stages[name] = {"done": True, "there": done[name], "disk": 0.0, "memory": 0.0, "seconds": 0.0}
        else:
            values = {"disk": shown_bytes(need.disk), "memory": shown_bytes(need.memory)}
            stages[name] = {"done": False, "there": 0, **values, "seconds": shown_seconds(need.seconds)}
    return {
        "stages": stages,
        "disk": sum(stage["disk"] for stage in stages.values()),
        "memory": max(stage["memory"] for stage in stages.values()),
        "seconds": sum(stage["seconds"] for stage in stages.values()),
    }


def shown_seconds(seconds: float) -> float:
    """A time as `human_time` shows it: to the minute, a tenth of an hour or a tenth of a day.

    >>> shown_seconds(0), shown_seconds(10), shown_seconds(100), shown_seconds(4000), shown_seconds(300_000)
    (0.0, 60.0, 120.0, 3960.0, 302400.0)
    """
    unit = 60.0 if seconds < 3600 else 360.0 if seconds < 48 * 3600 else 8640.0
    return unit * max(round(seconds / unit), 1 if seconds else 0)


def shown_bytes(count: float) -> float:
    """A size as `human_bytes` shows it: to a tenth of its unit.

    >>> shown_bytes(1000.4), shown_bytes(1024 * 1.26)
    (1000.0, 1331.2)
    """
    unit = 1.0
    while count >= 1024 * unit and unit < 1024**4:
        unit *= 1024
    part = unit / 10 if unit > 1 else 1.0
    return round(count / part) * part
