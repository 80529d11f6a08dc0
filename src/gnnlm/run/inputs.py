"""The inputs of each stage apart from its parents: every config value as resolved, not as written.

A field that the config leaves open is recorded with the value that a preset or a parent gives it, so that a changed
default makes a stage stale. Local text and models are identified by their content, so that a path may be spelled
differently and a run may be moved. Choices that are only made during the build (`lm.start: auto`, `cache.form: auto`)
are recorded as written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import read_manifest
from gnnlm.config import SCRATCH, flat
from gnnlm.config.evaluation_config import COSINE_TEMPERATURES, L2_TEMPERATURES
from gnnlm.errors import ArtifactError, CorpusError, ModelError
from gnnlm.progress import warn

if TYPE_CHECKING:
    from gnnlm.run import Run

WHERE = ("source", "dataset", "train", "valid", "test")  # the fields of the corpus that say where its text is
LATER_OPTIONS = {  # newer than some finished networks, which were trained as if with these values
    "attention_dropout": 0.0,
    "neighbour_dropout": 0.0,
    "typed_input": False,
}
READ = "train batches"  # how many batches of training the search is for, where it is not for all train positions
Facts = Mapping[str, Mapping[str, Any]]  # facts of the parents, by name


def _section(config: Any, prefix: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    return flat({key: value for key, value in config.model_dump(mode="json").items() if key not in skip}, f"{prefix}.")


def _corpus_inputs(run: Run, _: Facts) -> dict[str, Any]:
    from gnnlm.corpus.build import text_fingerprint, text_names

    corpus, was = run.config.corpus, _made_from(run, "corpus")
    text = {key: was.get(key) for key in (*(f"corpus.{name}" for name in WHERE), "text")}
    if not (was and run.reading):
        try:
            digests = text_fingerprint(corpus, leave_out=run.root)
            text = {**{f"corpus.{name}": value for name, value in text_names(corpus).items()}, "text": digests}
        except CorpusError as error:
            if not was:
                raise
            warn(f"{error}; the corpus that was built earlier is used")
    section = _section(corpus, "corpus", skip=("data_dir", "min_documents", *WHERE))
    section["corpus.overlap"] = corpus.overlap_rule
    limited = corpus.max_valid_tokens is not None or corpus.max_test_tokens is not None
    older = run.reading and was and "corpus.min_documents" not in was  # can be read as it is
    if limited and corpus.shared_by > 1 and not older:
        section["corpus.min_documents"] = corpus.shared_by
    if (segment := _segment_tokens(run, was)) is not None:
        section["store.segment_tokens"] = segment
    return {**section, **text, "seed": run.config.seed, "model files": _model_files(run, was)}


def _segment_tokens(run: Run, was: Mapping[str, Any]) -> int | None:
    """The size of a segment, as far as it matters: a train text that fits into one is the same whatever the size.

    None for a corpus that was made before there were segments: it has one.
    """
    size = run.config.store.segment_tokens
    if not was:
        return size
    train, before = read_manifest((run.origin or run).path("corpus")).facts["train"], was.get("store.segment_tokens")
    positions = train["tokens"] + train["documents"]
    alike = positions <= size and (before is None or positions <= before)
    return before if alike or (run.reading and before is None) else size


def _made_from(run: Run, name: str) -> Mapping[str, Any]:
    """The inputs that a stage was built from; empty if it is not built or cannot be read."""
    try:
        inputs: dict[str, Any] = read_manifest((run.origin or run).path(name)).inputs
    except ArtifactError:
        return {}
    return inputs


def _model_files(run: Run, was: Mapping[str, Any]) -> str:
    name = run.config.lm.model
    if name == SCRATCH:
        return SCRATCH
    from gnnlm.lm.model_files import model_fingerprint

    try:
        return model_fingerprint(name)
    except ModelError:
        if not was:
            raise
        return str(was["model files"])  # a missing model is reported when it is needed


def _lm_inputs(run: Run, facts: Facts) -> dict[str, Any]:
    lm = run.config.lm
    shared = {"lm.continuous": lm.continuous, "seed": run.config.seed}
    if lm.model != SCRATCH:
        return {**_section(lm.finetune, "lm.finetune"), **shared}
    from gnnlm.lm.architecture import resolve_architecture

    kind, options = resolve_architecture(lm.architecture, facts["corpus"]["vocabulary"]["size"])
    architecture = flat({"kind": kind, **options.as_dict()}, "lm.architecture.")
    return {**architecture, **_section(lm.train, "lm.train"), **shared}


def _encode_inputs(run: Run, _: Facts) -> dict[str, Any]:
    lm = _section(run.config.lm, "lm", skip=("model", "device", "architecture", "train", "finetune"))
    return {**lm, **_section(run.config.store, "store", skip=("segment_tokens",))}


def _codec_inputs(run: Run, _: Facts) -> dict[str, Any]:
    idle = () if run.config.codec.kind == "pq" else ("bytes", "train_rows")  # fp16 does not use these
    return {**_section(run.config.codec, "codec", skip=idle), "seed": run.config.seed}


def _index_inputs(run: Run, facts: Facts) -> dict[str, Any]:
    from gnnlm.retrieval.auto_index import choose_index

    index, rows = run.config.index, facts["corpus"]["train"]["tokens"]
    kind = choose_index(index, rows, facts["encode"]["width"]).kind
    clusters = index.clusters_of(rows) if kind in ("ivf", "paper") else None
    section = _section(index, "index", skip=("probes", "clusters", "memory_gb"))
    section["index.kind"] = "ivfpq" if kind == "paper" else kind  # the name that older runs have recorded
    return {**section, "index.clusters": clusters, "seed": run.config.seed}


def _search_inputs(run: Run, facts: Facts) -> dict[str, Any]:
    from gnnlm.retrieval.search import LeakageRule

    config = run.config
    rule = LeakageRule.of(config, facts["encode"]["receptive_field"])
    idle = config.exclude == "none" or (rule.whole_document and not config.lm.continuous)  # the document is enough
    return {
        **({} if idle else {"leakage span": rule.span}),
        **_read_by_training(run, facts),
        **_section(config.search, "search"),
        "search.exclude": config.exclude,
        "index.probes": config.index.probes,
        "lm.window": config.lm.window,
        "gnn.left": config.gnn.left,
        "gnn.right": config.gnn.right,
    }


def _read_by_training(run: Run, facts: Facts) -> dict[str, Any]:
    """What decides which train positions are searched; nothing where all are.

    A training with fewer batches of the same order reads some of the same positions: what was searched is enough.
    """
    from gnnlm.retrieval.search import searched_positions

    train, text = run.config.train, facts["corpus"]["train"]
    batches = sum(phase.steps for phase in train.curriculum) * train.accumulate
    may_read = min(text["tokens"] + text["documents"], run.config.search.max_train or 10**18)
    was = _made_from(run, "search")
    if was and READ not in was:
        return {}
    order = ("train.block", "train.batch_blocks", "train.valid_tokens", "seed")
    if was and not run.config.gnn.layers:  # nothing is trained, so whatever was searched is enough
        return {name: was[name] for name in (*order, READ)}
    if searched_positions(run.config, may_read) == may_read:
        return {}
    values = (train.block, train.batch_blocks, train.valid_tokens, run.config.seed)
    made = dict(zip(order, values, strict=True))
    alike = all(was.get(name) == value for name, value in made.items())
    return {**made, READ: max(batches, was[READ]) if was and alike else batches}


def _train_inputs(run: Run, facts: Facts) -> dict[str, Any]:
    from gnnlm.gnn.gnn_options import resolve_options, similarity_best

    config = run.config
    options = resolve_options(config.gnn, facts["encode"]["width"], best=similarity_best(config.index.metric)).as_dict()
    del options["similarity_unit"]  # comes from the neighbour tables
    options = {name: value for name, value in options.items() if LATER_OPTIONS.get(name) != value}
    return {
        **flat(options, "gnn."),
        **_section(config.train, "train", skip=("device",)),
        "seed": config.seed,
    }


def _cache_inputs(run: Run, _: Facts) -> dict[str, Any]:
    return {**_section(run.config.cache, "cache"), "graph k": run.graph_k, "seed": run.config.seed}


def _tune_inputs(run: Run, _: Facts) -> dict[str, Any]:
    tune = run.config.tune
    grid = COSINE_TEMPERATURES if run.config.index.metric == "cosine" else ["units of l2", *L2_TEMPERATURES]
    section = _section(tune, "tune", skip=("temperatures", "gate"))
    was = _made_from(run, "tune")
    if run.config.gate and not (run.reading and was and "tune.gate" not in was):  # an older run can be read as it is
        section["tune.gate"] = True
    resolved = {"tune.temperatures": tune.temperatures or grid, "tune.buckets": run.config.buckets}
    return {**section, **resolved, "graph k": run.graph_k}


def _passages_inputs(run: Run, _: Facts) -> dict[str, Any]:
    return _section(run.config.eval.context_retrieval, "eval.context_retrieval", skip=("enabled",))


def _eval_inputs(run: Run, _: Facts) -> dict[str, Any]:
    return {"eval.bootstrap": run.config.eval.bootstrap, "seed": run.config.seed}


OWN_INPUTS: dict[str, Callable[[Run, Facts], dict[str, Any]]] = {
    "corpus": _corpus_inputs,
    "lm": _lm_inputs,
    "encode": _encode_inputs,
    "codec": _codec_inputs,
    "index": _index_inputs,
    "search": _search_inputs,
    "train": _train_inputs,
    "cache": _cache_inputs,
    "tune": _tune_inputs,
    "passages": _passages_inputs,
    "eval": _eval_inputs,
}
