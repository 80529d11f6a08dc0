"""What each stage needs: a formula for each, from the config, the sizes of the run, and the rates of the machine.

Sizes in bytes follow from the config. Times are numbers of units of work, each of which takes as long as its rate
says: right to a factor of two where the rates were measured with the run's own models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gnnlm.config import SCRATCH, Config, FitConfig
from gnnlm.datastore.quantize import LEVELS, OPQ_ROUNDS, check_bytes
from gnnlm.evaluate.context_retrieval import Setting, first_settings, other_queries, other_strides
from gnnlm.gnn.gnn_options import GnnOptions, resolve_options
from gnnlm.plan.rates import DISTINCT, Rates, prediction_k, token_operations
from gnnlm.plan.sizes import ModelSizes, TextSize
from gnnlm.predict.window_cache import cache_bytes, table_shapes
from gnnlm.retrieval.faiss_build import training_rows
from gnnlm.retrieval.search import searched_positions
from gnnlm.retrieval.search_costs import index_shape

CORPUS_RATE = 1e5  # tokens read, split and compared in a second, by one core
REPORT_SECONDS = 2.0  # the report's figures and intervals
CODE_ROUNDS, CLUSTER_ROUNDS = 25, 10  # FAISS's rounds of k-means: for codes, and for the clusters of an index
CODED = 12 * LEVELS  # a row is compared with all levels of its code, part by part: slower than whole keys (measured)
CODE_ROWS = 65_536  # FAISS learns the codes of an index from at most so many rows
LIST_SCORES = 3e8  # bytes for the scores of a batch of queries
PROCESS = 6e8  # bytes that Python, torch and FAISS need themselves


@dataclass(frozen=True)
class Need:
    """What a stage needs: bytes on disk, bytes in memory, seconds."""

    disk: float
    memory: float
    seconds: float


@dataclass(frozen=True)
class PlanFacts:
    """What a plan is made from, beside the config."""

    model: ModelSizes
    text: Mapping[str, TextSize]
    rates: Rates

    @property
    def rows(self) -> int:
        """The rows of the store."""
        return self.text["train"].positions

    @property
    def positions(self) -> int:
        """The positions of all splits."""
        return sum(size.positions for size in self.text.values())


def plan(config: Config, facts: PlanFacts) -> dict[str, Need]:
    """Return what each stage needs, those left out that a config has no use for."""
    needs = {stage: formula(config, facts) for stage, formula in FORMULAS.items()}
    return {stage: replace(need, memory=need.memory + PROCESS) for stage, need in needs.items() if need is not None}


def corpus_need(config: Config, facts: PlanFacts) -> Need:
    return Need(12.0 * facts.positions, 8.0 * facts.positions, facts.positions * facts.rates.pace / CORPUS_RATE)


def lm_need(config: Config, facts: PlanFacts) -> Need | None:
    """Four copies of the weights: themselves, gradients, and two moments."""
    if not config.lm.is_trained:
        return None
    model, train = facts.model, facts.text["train"].tokens
    weights = 4.0 * model.parameters
    first_readings = 0.0
    fit: FitConfig
    if config.lm.model == SCRATCH:
        fit, steps = config.lm.train, config.lm.train.steps
    else:
        fit = tuning = config.lm.finetune
        steps = max(1, round(tuning.epochs * train / (fit.batch_tokens * fit.accumulate)))
        if tuning.unread == "first-reading":
            first_readings = 2.0 * train * model.width
    activations = fit.batch_tokens * (6.0 * model.parameters / model.width + 12.0 * min(model.vocabulary, 50_000))
    learned = steps * fit.batch_tokens * fit.accumulate
    validated = (1 + steps // fit.validate_every) * min(fit.valid_tokens, facts.text["valid"].tokens)
    seconds = learned * facts.rates.learn + validated * facts.rates.read
    return Need(4 * weights + first_readings, 4 * weights + activations, seconds)


def encode_need(config: Config, facts: PlanFacts) -> Need:
    """A window's context is read again; one segment is encoded at a time."""
    model, train, window = facts.model, facts.text["train"], config.lm.window
    short = not config.lm.continuous and train.documents and train.tokens / train.documents < window
    repeated = 1.0 if short else window / (window - config.lm.context)
    kept = 24.0 * min(train.positions, config.store.segment_tokens)
    if config.lm.continuous:
        kept += 4.0 * train.positions
    memory = 8.0 * model.parameters + 40.0 * config.lm.batch_tokens * model.width + kept
    disk = facts.positions * model.width * state_bytes(config) + 4.0 * model.head_parameters
    return Need(disk, memory, facts.positions * repeated * facts.rates.read)


def state_bytes(config: Config) -> int:
    """Return the bytes of one value of a state, with that of its key if keys are stored beside states."""
    return (2 if config.store.dtype == "fp16" else 4) * (2 if config.store.key == "ffn_input" else 1)


def codec_need(config: Config, facts: PlanFacts) -> Need | None:
    if config.codec.kind != "pq":
        return None
    codec, width = config.codec, facts.model.width
    check_bytes(width, codec.bytes, "codec.bytes")
    compared = min(facts.rows, codec.train_rows) * learning_codes(width, rotated=True) + facts.rows * CODED
    return Need(facts.rows * codec.bytes, 4.0 * codec.train_rows * width, compared * facts.rates.compare)


def learning_codes(width: int, rotated: bool) -> float:
    """Return how many comparisons of whole keys each row costs that product codes are learned from."""
    return CODE_ROUNDS * LEVELS + (OPQ_ROUNDS * (4.0 * LEVELS + width) if rotated else 0.0)


def index_need(config: Config, facts: PlanFacts) -> Need:
    """The index is trained on a sample, then each row is assigned to a cluster and coded, segment by segment."""
    rows, width = facts.rows, facts.model.width
    shape = index_shape(config.index, rows, width)
    if shape is None:
        return Need(0.0, 0.0, rows / 1e6)  # nothing is built: the keys are the states
    disk = rows * (shape.code_bytes + 8.0) + shape.centroid_bytes
    sample = training_rows(shape.clusters, rows)
    compared = CLUSTER_ROUNDS * shape.clusters * sample + shape.clusters_compared * rows
    if shape.code.startswith("PQ"):
        compared += min(sample, CODE_ROWS) * learning_codes(width, config.index.kind == "paper") + rows * CODED
    segment = disk * min(1.0, config.store.segment_tokens / max(1, rows))
    return Need(disk, segment + 4.0 * sample * width, compared * facts.rates.compare)


def search_need(config: Config, facts: PlanFacts) -> Need:
    rows, rates, width = facts.rows, facts.rates, facts.model.width
    train = searched_positions(config, min(rows, config.search.max_train or rows))
    held_out = facts.positions - rows
    neighbours = train * min(config.search.graph_k, rows) + held_out * min(config.search.k, rows)
    shape = index_shape(config.index, rows, width)
    if shape is None:
        query, memory = rows * rates.compare, 4.0 * rows * width
    else:
        query = shape.clusters_compared * rates.compare + shape.rows_scanned(rows) * rates.scan
        memory = rows * shape.row_bytes + shape.centroid_bytes + LIST_SCORES
    return Need(8.0 * neighbours, memory, (train + held_out) * query + neighbours * rates.neighbour)


def train_need(config: Config, facts: PlanFacts) -> Need | None:
    if not config.gnn.layers:
        return None
    train, options = config.train, resolve_options(config.gnn, facts.model.width)
    weights = 4.0 * facts.model.gnn_parameters
    tokens = train.block * train.batch_blocks
    learning = sum(
        phase.steps * tokens * train.accumulate * facts.rates.train_at(phase.k) for phase in train.curriculum
    )
    validations = 1 + sum(phase.steps for phase in train.curriculum) // train.validate_every
    validated = validations * min(train.valid_tokens, facts.text["valid"].positions)
    most = DISTINCT * tokens * max(phase.k for phase in train.curriculum)  # rows of a batch
    activations = 4.0 * most * options.width * options.window * kept_states(options, train.checkpoint)
    memory = 4 * weights + 8.0 * facts.model.head_parameters + activations + 8.0 * facts.rows + 2e8
    seconds = learning + validated * score_seconds(config, facts, train.curriculum[-1].k, cached=False)
    return Need(4 * weights, memory, seconds)


def kept_states(options: GnnOptions, checkpoint: bool) -> int:
    """Return how many states of a window slot are kept for the backward pass."""
    if not options.neighbour_updates:
        return 2  # the state itself, and normed
    if checkpoint:
        return 2 + 3 * (options.layers - 1)  # and after each update: in chunks, joined, and normed
    return 6 * options.layers


def score_seconds(config: Config, facts: PlanFacts, k: int, cached: bool) -> float:
    """Return the seconds in which a token is scored with k neighbours."""
    measured = token_operations(config, facts.model, prediction_k(config))
    return facts.rates.score * token_operations(config, facts.model, k, cached) / measured


def cache_need(config: Config, facts: PlanFacts) -> Need | None:
    if not config.gnn.layers:
        return None
    size = cached_bytes(config, facts)
    return Need(size, 4.0 * facts.model.head_parameters, facts.rows * facts.rates.row if size else 0.0)


def cached_bytes(config: Config, facts: PlanFacts) -> float:
    """Return the size of the cache that the config names; for `auto`, of the largest form within the limit."""
    cache, options = config.cache, resolve_options(config.gnn, facts.model.width)
    if cache.form == "none":
        return 0.0
    forms = ("states", "projected") if cache.form == "auto" else (cache.form,)
    sizes = [cache_bytes(table_shapes(options, form == "projected", facts.rows), cache) for form in forms]
    limit = cache.limit_gb * 1e9 if cache.form == "auto" else float("inf")
    return float(max((size for size in sizes if size <= limit), default=0))


def tune_need(config: Config, facts: PlanFacts) -> Need:
    """Valid is scored, every k, temperature and weight is tried, and the gate is fitted."""
    memory, scoring = _scoring(config, facts, "valid")
    tried = len(config.tune.ks) * len(config.tune.temperatures or range(12)) * len(config.tune.lambdas)
    fitting = 3e-7 * facts.text["valid"].positions * tried / 8 + 1.0
    return Need(0.0, memory, scoring + fitting * facts.rates.pace)


def eval_need(config: Config, facts: PlanFacts) -> Need:
    memory, scoring = _scoring(config, facts, "test")
    disk = 40.0 * facts.text["test"].positions
    return Need(disk, memory, scoring + REPORT_SECONDS * facts.rates.pace)


def _scoring(config: Config, facts: PlanFacts, split: str) -> tuple[float, float]:
    """Return the memory and the seconds that scoring a split takes."""
    options, k = resolve_options(config.gnn, facts.model.width), prediction_k(config)
    rows_read = 4.0 * config.eval.block * k * options.window * options.width
    memory = 8.0 * facts.model.head_parameters + rows_read + 8.0 * facts.rows + 3e8
    token = score_seconds(config, facts, k, cached=cached_bytes(config, facts) > 0)
    return memory, token * facts.text[split].positions


def passages_need(config: Config, facts: PlanFacts) -> Need | None:
    """At most: consecutive lookups that find the same passages are read once, and the chosen setting may cost less."""
    wanted = config.eval.context_retrieval
    if not wanted.enabled:
        return None

    def tokens_read(setting: Setting, split: str, limit: int) -> float:
        size, passages = facts.text[split], setting.count * setting.length
        document = size.tokens / (1 if config.lm.continuous else max(1, size.documents))
        before = min(config.lm.window - passages, document / 2)
        return min(limit, size.tokens) / setting.stride * (passages + before)

    largest = Setting(max(wanted.counts), max(wanted.lengths), wanted.queries[0], max(wanted.strides))
    strides = other_strides(largest, wanted)
    tried = first_settings(wanted) + other_queries(largest, wanted) + strides
    dearest = strides[-1] if strides else largest
    read = sum(tokens_read(setting, "valid", wanted.tune_tokens) for setting in tried)
    read += tokens_read(dearest, "test", wanted.tokens)
    kept = min(wanted.tune_tokens, facts.text["valid"].tokens) + min(wanted.tokens, facts.text["test"].tokens)
    batch = max(config.lm.batch_tokens, config.lm.window)
    memory = 8.0 * facts.model.parameters + 40.0 * batch * facts.model.width + 100.0 * facts.rows
    return Need(kept * facts.model.width * state_bytes(config), memory, read * facts.rates.read)


FORMULAS: dict[str, Callable[[Config, PlanFacts], Need | None]] = {
    "corpus": corpus_need,
    "lm": lm_need,
    "encode": encode_need,
    "codec": codec_need,
    "index": index_need,
    "search": search_need,
    "train": train_need,
    "cache": cache_need,
    "tune": tune_need,
    "passages": passages_need,
    "eval": eval_need,
}
