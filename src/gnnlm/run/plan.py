"""Estimates of the disk, memory and time that a run still needs.

Sizes are computed from the config. Times are so many units of work, each of which takes so long (`rates.py`): about
right to a factor of two where the rates were measured with the run's own models (`calibrate.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gnnlm.config import SCRATCH, Config, IndexConfig
from gnnlm.datastore.quantize import LEVELS, OPQ_ROUNDS, check_bytes
from gnnlm.run.rates import DISTINCT, NetworkCost, Rates
from gnnlm.run.sizes import Amount, Description

if TYPE_CHECKING:
    from gnnlm.gnn.gnn_options import GnnOptions

CORPUS_RATE = 1e5  # tokens read, split and compared in a second, by one core
FIGURES = 2.0  # seconds that the report's figures and intervals take
TRAINED_STEPS, CLUSTER_STEPS = 25, 10  # FAISS's rounds of k-means: for codes, and for the clusters of an index
CODED = 12 * LEVELS  # a row is compared with all levels of its code, part by part: slower than whole keys (measured)
CODE_ROWS = 65_536  # FAISS learns the codes of an index from at most so many rows
LISTS_SCORES = 3e8  # memory for the scores of a batch of queries
PROCESS = 6e8  # memory that Python, torch and FAISS need themselves, in bytes


@dataclass(frozen=True)
class Need:
    """What a stage needs: bytes on disk, bytes in memory, seconds on this machine."""

    disk: float
    memory: float
    seconds: float


def plan(config: Config, about: Description, text: dict[str, Amount], rates: Rates) -> dict[str, Need]:
    """What each stage needs."""
    total = sum(amount.positions for amount in text.values())
    rows = text["train"].positions
    needs = {"corpus": Need(total * 12.0, total * 8.0, total * rates.pace / CORPUS_RATE)}
    if config.lm.is_trained:
        needs["lm"] = _lm_need(config, about, text, rates)
    needs["encode"] = _encode_need(config, about, text, rates)
    if config.codec.kind == "pq":
        needs["codec"] = _codec_need(config, about, rows, rates)
    needs["index"] = _index_need(config, rows, about.width, rates)
    needs["search"] = _search_need(config, text, about.width, rates)
    needs.update(_gnn_needs(config, about, text, rates))
    if config.eval.context_retrieval.enabled:
        needs["passages"] = _passages_need(config, about, text, rates)
        needs["eval"] = needs.pop("eval")  # the last stage
    return {
        name: replace(need, memory=need.memory + PROCESS, seconds=need.seconds + (rates.stage if need.seconds else 0))
        for name, need in needs.items()
    }


def _codec_need(config: Config, about: Description, rows: int, rates: Rates) -> Need:
    check_bytes(about.width, config.codec.bytes, "codec.bytes")
    sample = min(rows, config.codec.train_rows)
    seconds = (sample * _learning_codes(about.width) + rows * CODED) * rates.compare
    return Need(rows * config.codec.bytes, 4.0 * config.codec.train_rows * about.width, seconds)


def _learning_codes(width: int, rotated: bool = True) -> float:
    """Comparisons of whole keys for each row that product codes are learned from, with or without a rotation."""
    return TRAINED_STEPS * LEVELS + (OPQ_ROUNDS * (4.0 * LEVELS + width) if rotated else 0.0)


def _lm_need(config: Config, about: Description, text: dict[str, Amount], rates: Rates) -> Need:
    weights, train = 4.0 * about.parameters, text["train"].tokens
    fit, tuning = config.lm.train, config.lm.finetune
    if config.lm.model == SCRATCH:
        steps, a_step, tokens, readings = fit.steps, fit.batch_tokens * fit.accumulate, fit.batch_tokens, 0.0
        validated, every = fit.valid_tokens, fit.validate_every
    else:
        a_step, tokens = tuning.batch_tokens * tuning.accumulate, tuning.batch_tokens
        steps = max(1, round(tuning.epochs * train / a_step))
        validated, every = tuning.valid_tokens, tuning.validate_every
        readings = 2.0 * train * about.width if tuning.unread == "first-reading" else 0.0
    activations = tokens * (80.0 * about.width * about.layers + 12.0 * min(about.vocabulary, 50_000))
    validations = (1 + steps // every) * min(validated, text["valid"].tokens)
    seconds = steps * (a_step * rates.learn + rates.update) + validations * rates.read
    return Need(4 * weights + readings, 4 * weights + activations, seconds)


def _encode_need(config: Config, about: Description, text: dict[str, Amount], rates: Rates) -> Need:
    total = sum(amount.positions for amount in text.values())
    item = (2 if config.store.dtype == "fp16" else 4) * (2 if config.store.key == "ffn_input" else 1)
    train, window = text["train"], config.lm.window
    short = not config.lm.continuous and train.documents and train.tokens / train.documents < window
    repeated = 1.0 if short else window / (window - config.lm.context)  # a window's context is read again
    held = 24.0 * min(train.positions, config.store.segment_tokens)  # one segment is encoded at a time
    held += 4.0 * train.positions if config.lm.continuous else 0.0
    memory = 8.0 * about.parameters + 40.0 * config.lm.batch_tokens * about.width + held
    seconds = total * repeated * rates.read
    return Need(total * about.width * item + 4.0 * about.head_parameters, memory, seconds)


@dataclass(frozen=True)
class IndexShape:
    """An inverted index: its clusters, how many of them a query searches, and a row's code: its bytes and width.

    `factory` is the FAISS string of the code alone.
    """

    clusters: int
    probes: int
    code: int
    width: int
    factory: str

    @property
    def found(self) -> float:
        """How many clusters a key is compared with to find its own: all, or those on a path through an HNSW graph."""
        from gnnlm.retrieval.auto_index import MANY_CLUSTERS

        return self.clusters if self.clusters <= MANY_CLUSTERS else 2_000.0

    def probed(self, rows: int) -> float:
        """How many rows are in the clusters that a query searches."""
        return rows * min(1.0, self.probes / self.clusters)

    @property
    def timed(self) -> str:
        """The code whose scan is timed: its own, or that of whole keys in place of one that is in no lists."""
        return self.factory if re.match(r"PQ|SQ|RaBitQ", self.factory) else "Flat"

    @property
    def row(self) -> float:
        """Bytes of a row in memory: its code, FAISS's id, and its position."""
        from gnnlm.retrieval.auto_index import BESIDE_A_CODE

        return float(self.code + BESIDE_A_CODE)


def index_shape(config: IndexConfig, rows: int, width: int) -> IndexShape | None:
    """The inverted index over so many rows; None for exact search. Other factory strings count as whole keys."""
    from gnnlm.retrieval.auto_index import factory_of, resolved

    config = resolved(config, rows, width)
    if config.kind == "exact":
        return None
    if config.kind == "paper":
        check_bytes(width, config.bytes, "index.bytes")
    factory = factory_of(config, rows)
    reduced = re.search(r"PCA[RWS]*(\d+)|OPQ\d+_(\d+)", factory)
    inner = int(next(filter(None, reduced.groups()))) if reduced else width
    cells, code = re.search(r"IVF(\d+)", factory), factory.rsplit(",", 1)[-1]
    clusters = int(cells[1]) if cells else config.clusters_of(rows)
    return IndexShape(clusters, config.probes, _code_bytes(code, inner), inner, code)


def _code_bytes(code: str, width: int) -> int:
    """Bytes of a key under the code of a factory string.

    >>> [_code_bytes(code, 64) for code in ("Flat", "SQfp16", "SQ4", "PQ16", "PQ16x4fs", "HNSW32")]
    [256, 128, 32, 16, 8, 256]
    """
    if found := re.match(r"PQ(\d+)(?:x(\d+))?", code):
        return int(found[1]) * int(found[2] or 8) // 8
    bits = {"SQ4": 4, "SQ6": 6, "SQ8": 8, "SQfp16": 16, "SQbf16": 16}.get(code, 32)
    return width * bits // 8


def _index_need(config: Config, rows: int, width: int, rates: Rates) -> Need:
    from gnnlm.retrieval.faiss_build import training_rows

    shape = index_shape(config.index, rows, width)
    if shape is None:
        return Need(0.0, 0.0, rows / 1e6)  # nothing is built: the keys are the states
    size = rows * (shape.code + 8.0) + 4.0 * shape.clusters * shape.width
    sample = training_rows(shape.clusters, rows)
    compared = CLUSTER_STEPS * shape.clusters * sample + shape.found * rows  # trained, then each row is assigned
    if shape.factory.startswith("PQ"):
        compared += min(sample, CODE_ROWS) * _learning_codes(width, config.index.kind == "paper") + rows * CODED
    part = size * min(1.0, config.store.segment_tokens / max(1, rows))  # the part of one segment is built at a time
    return Need(size, part + 4.0 * sample * width, compared * rates.compare)


def _search_need(config: Config, text: dict[str, Amount], width: int, rates: Rates) -> Need:
    from gnnlm.retrieval.search import searched_positions

    rows, held = text["train"].positions, text["valid"].positions + text["test"].positions
    asked = searched_positions(config, min(rows, config.search.max_train or rows))
    k, graph_k = min(config.search.k, rows), min(config.search.graph_k, rows)
    table = asked * graph_k + held * k
    shape = index_shape(config.index, rows, width)
    if shape is None:
        a_query, memory = rows * rates.compare, rows * width * 4.0
    else:
        a_query = shape.found * rates.compare + shape.probed(rows) * rates.scan
        memory = rows * shape.row + 4.0 * shape.clusters * shape.width + LISTS_SCORES
    return Need(table * 8.0, memory, (asked + held) * a_query + table * rates.neighbour)


def _gnn_needs(config: Config, about: Description, text: dict[str, Amount], rates: Rates) -> dict[str, Need]:
    from gnnlm.gnn.gnn_options import resolve_options

    options, train, cost = resolve_options(config.gnn, about.width), config.train, NetworkCost.of(config, about)
    rows, valid = text["train"].positions, text["valid"].positions
    gnn, head = 4.0 * about.gnn_parameters, 4.0 * about.head_parameters
    tokens = train.block * train.batch_blocks
    steps = sum(phase.steps for phase in train.curriculum)
    learning = sum(phase.steps * tokens * train.accumulate * rates.train_at(phase.k) for phase in train.curriculum)
    k = config.eval.graph_k or config.search.graph_k
    validated = min(train.valid_tokens, valid) * rates.score * cost.at(train.curriculum[-1].k) / cost.at(k)
    learning += (1 + steps // train.validate_every) * validated
    most = DISTINCT * tokens * max(phase.k for phase in train.curriculum)
    kept = 4.0 * options.width * options.window * _kept_states(options, train.checkpoint)
    cached = _cache_bytes(config, options, rows)
    scoring = rates.score * cost.at(k, cached > 0) / cost.at(k)
    rows_read = 4.0 * config.eval.block * k * options.window * options.width
    memory = 4 * gnn + 2 * head + most * kept + 8.0 * rows + 2e8  # and the positions that were searched
    scoring_memory = 2 * head + rows_read + 8.0 * rows + 3e8
    return {
        "train": Need(4 * gnn, memory, learning),
        "cache": Need(cached, head, rows * rates.row if cached else 0.0),
        "tune": Need(0.0, scoring_memory, scoring * valid + _tuning_seconds(config, valid) * rates.pace),
        "eval": Need(
            text["test"].positions * 40.0, scoring_memory, scoring * text["test"].positions + FIGURES * rates.pace
        ),
    }


def _tuning_seconds(config: Config, valid: int) -> float:
    """Seconds of trying every k and temperature on valid, and of fitting the gate."""
    tried = len(config.tune.ks) * len(config.tune.temperatures or range(12))
    return 3e-7 * valid * tried * len(config.tune.lambdas) / 8 + 1.0


def _passages_need(config: Config, about: Description, text: dict[str, Amount], rates: Rates) -> Need:
    """At most: consecutive lookups that find the same passages are read once, and the chosen setting may cost less."""
    from gnnlm.evaluate.context_retrieval import Setting, first_settings, other_queries, other_strides

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
    return Need(kept * about.width * item, memory, tokens * rates.read)


def _kept_states(options: GnnOptions, checkpoint: bool) -> int:
    """How many states of a window slot are kept for the backward pass."""
    if not options.neighbour_updates:
        return 2  # the state itself, and normed
    if checkpoint:
        return 2 + 3 * (options.layers - 1)  # and after each update: in chunks, joined, and normed
    return 6 * options.layers


def _cache_bytes(config: Config, options: GnnOptions, rows: int) -> float:
    """The size of the cache that the config names; for `auto`, of the largest within the limit."""
    from gnnlm.predict.window_cache import cache_bytes, table_shapes

    if config.cache.form == "none":
        return 0.0
    forms = ("states", "projected") if config.cache.form == "auto" else (config.cache.form,)
    sizes = [cache_bytes(table_shapes(options, form == "projected", rows), config.cache) for form in forms]
    limit = config.cache.limit_gb * 1e9 if config.cache.form == "auto" else float("inf")
    return float(max((size for size in sizes if size <= limit), default=0))


def table_of(needs: dict[str, Need], done: dict[str, int], exact: bool = False) -> dict[str, Any]:
    """The plan as plain values: what each stage still needs, and the totals; a finished stage needs nothing more.

    Unless `exact`, values are rounded as the table shows them before they are added: the totals match the rows shown.
    """
    stages = {}
    for name, need in needs.items():
        if name in done:
            stages[name] = {"done": True, "there": done[name], "disk": 0.0, "memory": 0.0, "seconds": 0.0}
        elif exact:
            stages[name] = {"done": False, "there": 0, **vars(need)}
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
