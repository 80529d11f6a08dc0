"""The stages: how each is built, and where its artifact is stored.

This module only connects the other packages, and is the one place that knows all of them. They are imported when a
stage is built, so that importing this module is cheap. The inputs of each stage are in `inputs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import SCRATCH, LMConfig
from gnnlm.errors import ModelError
from gnnlm.progress import say, warn
from gnnlm.run.segment import cached_from, encoded_from

if TYPE_CHECKING:
    from gnnlm.run import Run
    from gnnlm.train.training_loop import TrainingSetup
    from gnnlm.train.training_task import Log


@dataclass(frozen=True)
class Stage:
    name: str
    folder: str
    parents: tuple[str, ...]
    build: Callable[[Run, Draft], Artifact]
    help: str
    part: str = ""  # the folder of its part of each segment, if it has such parts
    trains: bool = False  # it is a training, which several processes share


# -- how each stage is built ----------------------------------------------------------------------------------


def _build_corpus(run: Run, draft: Draft) -> Artifact:
    from gnnlm.corpus.build import build_corpus

    config, parts = run.config, run.parts
    return build_corpus(
        draft,
        config.corpus,
        config.seed,
        lambda: (parts.source_lm, parts.source_lm.vocab_size),
        config.store.segment_tokens,
    )


def _build_lm(run: Run, draft: Draft) -> Artifact:
    import torch

    from gnnlm.corpus.vocabulary import load_vocabulary
    from gnnlm.lm.architecture import build_model
    from gnnlm.lm.hf_model import HFModel
    from gnnlm.lm.load_lm import usable_device
    from gnnlm.train.finetune import finetune_hf
    from gnnlm.train.processes import here
    from gnnlm.train.tensorboard import tensorboard
    from gnnlm.train.train_lm import train_native

    config, seed, parts = run.config.lm, run.config.seed, run.parts
    if (device := torch.device(usable_device(config.device))).index is not None and here().count == 1:
        torch.cuda.set_device(device)  # of several processes, each has its own
    with tensorboard(run.root / "tensorboard" / "lm") as log:
        fitting = _fitting(run, draft, log, config.device)
        if config.model != SCRATCH:
            if not isinstance(parts.source_lm, HFModel):
                raise ModelError(
                    "lm.finetune works with Hugging Face models only; to train a native model, set lm.model to scratch"
                )
            return finetune_hf(fitting, parts.source_lm, parts.streams, config.finetune)
        vocabulary = load_vocabulary(run.artifact("corpus").path)
        assert vocabulary is not None
        torch.manual_seed(seed)
        model = build_model(config.architecture, len(vocabulary))
        _warn_of_positions(config)
        return train_native(fitting, model, vocabulary, parts.streams, config)


def _fitting(run: Run, draft: Draft, log: Log, device: str) -> TrainingSetup:
    from gnnlm.train.training_loop import TrainingSetup

    seed, stop_file = run.config.seed, run.root / "stop"
    return TrainingSetup(draft, seed, cpu=device == "cpu", log=log, stop_file=stop_file, finish=run.finish_training)


def _warn_of_positions(config: LMConfig) -> None:
    """Warn if a model with absolute positions would be read at positions that it was not trained on."""
    from gnnlm.lm.architecture import PRESETS

    absolute = config.model == SCRATCH and PRESETS[config.architecture.preset][0] == "adaptive"
    if absolute and config.window > config.train.block:
        warn(
            f"lm.window is {config.window}, longer than lm.train.block: the model will be read at positions that it "
            f"has never seen, and predict badly there; set lm.window to at most {config.train.block}"
        )


def _build_store(run: Run, draft: Draft) -> Artifact:
    from gnnlm.datastore.encode import build_store
    from gnnlm.datastore.quantize import check_bytes
    from gnnlm.gnn.gnn_options import resolve_options
    from gnnlm.retrieval.bm25 import open_bm25
    from gnnlm.retrieval.faiss_build import check_index

    config, lm, streams = run.config, run.parts.lm, run.parts.streams
    _warn_of_positions(config.lm)
    options = resolve_options(config.gnn, lm.width)  # refuse before the long work what could not work later
    if config.codec.kind == "pq":
        check_bytes(lm.width, config.codec.bytes, "codec.bytes")
    if config.cache.dtype == "pq":
        check_bytes(options.width, config.cache.bytes, "cache.bytes")
    check_index(config.index, lm.width, streams["train"].token_count)
    if config.eval.context_retrieval.enabled:
        open_bm25()
    made_from = encoded_from(run, draft.inputs)
    return build_store(draft, streams, lm, config.lm, config.store, made_from, run.spread("encode"))


def _build_codec(run: Run, draft: Draft) -> Artifact:
    from gnnlm.datastore.codec import build_codec

    return build_codec(draft, run.parts.artifact("encode"), run.config.codec, run.config.seed, run.spread("codec"))


def _build_index(run: Run, draft: Draft) -> Artifact:
    from gnnlm.retrieval.index_stage import build_index

    config, parts = run.config, run.parts
    encoded, train = parts.artifact("encode"), parts.streams["train"]
    return build_index(draft, encoded, train, config.index, config.seed, run.spread("index"), parts.live)


def _build_tables(run: Run, draft: Draft) -> Artifact:
    from gnnlm.retrieval.search import build_tables

    config, parts = run.config, run.parts
    if config.exclude == "none":
        warn("search.exclude is none: train positions retrieve themselves, and the network learns to copy its answer")
    index, rows, shard = parts.index, len(parts.streams["train"]), config.search.shard_queries
    made = build_tables(draft, parts.queries, index, rows, shard, run.spread("search"))
    for split, found in made.facts["k"].items():
        if found < (config.search.graph_k if split == "train" else config.search.k):
            warn(f"the store has only {len(index)} rows: {found} neighbours per {split} position")
        if made.facts["short_of_k"][split]:
            warn(f"{made.facts['short_of_k'][split]:,} {split} positions found fewer than {found} neighbours")
    return made


def _build_gnn(run: Run, draft: Draft) -> Artifact:
    import torch

    from gnnlm.gnn.gnn_options import resolve_options, similarity_best, similarity_unit
    from gnnlm.gnn.model import GnnModel
    from gnnlm.train.tensorboard import tensorboard
    from gnnlm.train.train_gnn import TrainingTexts, train_gnn

    config, parts = run.config, run.parts
    torch.manual_seed(config.seed)
    train, valid, metric = parts.searched("train"), parts.searched("valid"), config.index.metric
    unit, best = similarity_unit(metric, train.table.similarity), similarity_best(metric)
    model = GnnModel(resolve_options(config.gnn, parts.head.width, unit, best), parts.head)
    model.checkpoint = config.train.checkpoint
    with tensorboard(run.curves) as log:
        fitting = _fitting(run, draft, log, config.train.device)
        texts = TrainingTexts(train, valid, torch.from_numpy(parts.train_positions))
        return train_gnn(fitting, model, parts.head, parts.graphs, texts, config.train)


def _build_cache(run: Run, draft: Draft) -> Artifact:
    import torch

    from gnnlm.predict.cache_form import TRIAL_TOKENS, Trial
    from gnnlm.predict.cache_stage import build_cache

    parts, valid = run.parts, run.parts.searched("valid")
    assert parts.gnn is not None
    positions = torch.arange(min(TRIAL_TOKENS, len(valid.text)))[None]
    trial = Trial(valid.context(positions), valid.table.at(positions, run.graph_k))
    encoded, codec = parts.artifact("encode"), parts.artifact("codec")
    states = [part.fingerprint for part in encoded.parts]
    coded = codec.facts["kind"] != "fp16"
    codes = [part.fingerprint for part in codec.parts or (codec,)] if coded else [None] * len(states)
    made_from = [cached_from(run, one, other) for one, other in zip(states, codes, strict=True)]
    config, seed = run.config.cache, run.config.seed
    spread = run.spread("cache")
    return build_cache(draft, parts.gnn, parts.graphs, trial, config, seed, parts.device, made_from, spread)


def _build_tuning(run: Run, draft: Draft) -> Artifact:
    from gnnlm.artifact import write_json
    from gnnlm.evaluate.tune import grid_of, losses_of, tune
    from gnnlm.predict.predictor import perplexity
    from gnnlm.predict.split_scoring import score_surely

    config, parts, valid = run.config.tune, run.parts, run.parts.searched("valid")
    wanted = ("base",) if parts.gnn is None else ("base", "gnn")
    asked = wanted if run.config.gate else ()
    block, spread = run.config.eval.block, run.spread("tune")
    predictor = parts.predictor_with({})
    scored = score_surely(predictor, valid, block, "score valid", wanted, asked, draft=draft, spread=spread)
    grid = grid_of(config, run.config.buckets, run.config.index.metric, valid.table.similarity)
    tuned = tune(valid, parts.store, scored, grid, run.config.gate)
    write_json(draft.file("tuning.json"), tuned.table)
    for name, choice in tuned.choices.items():
        ppls = ", ".join(f"{variant} {perplexity(loss):.3f}" for variant, loss in choice.losses.items())
        say(f"tune: cross-validated perplexity of {name} with {ppls}; {choice.best} is used")
    variants = {"variants": {name: choice.as_dict() for name, choice in tuned.choices.items()}}
    return draft.finish(
        {
            "mix": {name: mix.as_dict() for name, mix in tuned.mixes.items()},
            "valid_loss": losses_of(valid, parts.store, scored, tuned.mixes),
            **(variants if tuned.choices else {}),
        }
    )


def _build_passages(run: Run, draft: Draft) -> Artifact:
    from gnnlm.evaluate.context_retrieval import build_passages

    parts = run.parts
    return build_passages(draft, parts.streams, parts.lm, parts.head, run.artifact("encode"), run.config)


def _build_report(run: Run, draft: Draft) -> Artifact:
    from gnnlm.evaluate.evaluation import Evaluation, build_report
    from gnnlm.evaluate.passage_rows import ReadWithPassages

    def artifact(name: str) -> Artifact | None:
        return run.artifact(name) if name in run.stages else None

    config, parts = run.config, run.parts
    given = Evaluation(
        parts.predictor,
        parts.searched("test"),
        parts.streams["test"],
        corpus=run.artifact("corpus"),
        encoded=run.artifact("encode"),
        indexed=run.artifact("index"),
        searched=run.artifact("search"),
        codec=run.artifact("codec"),
        tuned=run.artifact("tune"),
        model=config.lm.model,
        lm=artifact("lm"),
        training=artifact("train"),
        cache=artifact("cache"),
        passages=None
        if (read := artifact("passages")) is None
        else ReadWithPassages(
            read,
            parts.streams,
            parts.index,
            config.search.k,
            config.search.shard_queries,
            config.tune,
            config.buckets,
        ),
    )
    return build_report(draft, given, config.eval, config.corpus.overlap_ngram, config.seed, run.spread("eval"))


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("corpus", "corpus", (), _build_corpus, "Read, split, clean and tokenize the text.", "text"),
        Stage("lm", "lm", ("corpus",), _build_lm, "Train or fine-tune the base model.", trains=True),
        Stage(
            "encode",
            "store",
            ("corpus", "lm"),
            _build_store,
            "Turn every position into a state of the frozen LM.",
            "states",
        ),
        Stage("codec", "codec", ("encode",), _build_codec, "Compress the states that neighbour nodes carry.", "codes"),
        Stage("index", "index", ("corpus", "encode"), _build_index, "Index the train states for search.", "index"),
        Stage(
            "search",
            "search",
            ("corpus", "encode", "index"),
            _build_tables,
            "Look up the neighbours of every position.",
        ),
        Stage("train", "gnn", ("encode", "codec", "search"), _build_gnn, "Train the graph network.", trains=True),
        Stage(
            "cache",
            "cache",
            ("encode", "codec", "search", "train"),
            _build_cache,
            "Precompute the trained network's neighbour states, so that scoring need not compute them.",
            "cache",
        ),
        Stage(
            "tune", "tune", ("encode", "search", "train", "cache"), _build_tuning, "Choose k, T and lambda on valid."
        ),
        Stage(
            "passages",
            "passages",
            ("corpus", "lm", "encode"),
            _build_passages,
            "Read test with retrieved passages before the text, to compare (eval.context_retrieval).",
        ),
        Stage(
            "eval",
            "report",
            ("encode", "search", "train", "cache", "tune", "passages"),
            _build_report,
            "Score test once and print the report.",
        ),
    )
}
