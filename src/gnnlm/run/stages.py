"""The stages: how each is built, and where it leaves its artifact. What each is made from is in `inputs.py`.

Wiring only, and the one place that knows every part. Parts are imported when a stage is built, so that importing
this is light.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import SCRATCH, LMConfig
from gnnlm.corpus.stream import SPLITS
from gnnlm.errors import ModelError
from gnnlm.progress import warn

if TYPE_CHECKING:
    from gnnlm.run import Run


@dataclass(frozen=True)
class Stage:
    name: str
    folder: str
    parents: tuple[str, ...]
    build: Callable[[Run, Draft], Artifact]
    help: str


# -- how each stage is built: wiring only ---------------------------------------------------------------------


def _build_corpus(run: Run, draft: Draft) -> Artifact:
    from gnnlm.corpus.build import build_corpus

    return build_corpus(draft, run.config.corpus, run.config.seed, lambda: (run.source_lm, run.source_lm.vocab_size))


def _build_lm(run: Run, draft: Draft) -> Artifact:
    import torch

    from gnnlm.corpus.vocabulary import load_vocabulary
    from gnnlm.lm.architecture import build_model
    from gnnlm.lm.hf import HFModel
    from gnnlm.lm.load import usable_device
    from gnnlm.train.finetune import finetune_hf
    from gnnlm.train.lm import train_native
    from gnnlm.train.logging import tensorboard

    config, seed = run.config.lm, run.config.seed
    if (device := torch.device(usable_device(config.device))).index is not None:
        torch.cuda.set_device(device)  # what accelerate takes
    with tensorboard(run.root / "tensorboard" / "lm") as log:
        if config.model != SCRATCH:
            if not isinstance(run.source_lm, HFModel):
                raise ModelError("lm.finetune is for Hugging Face models; train one of ours with lm.model: scratch")
            return finetune_hf(draft, run.source_lm, run.streams, config, seed, log)
        vocabulary = load_vocabulary(run.artifact("corpus").path)
        assert vocabulary is not None
        torch.manual_seed(seed)
        model = build_model(config.architecture, len(vocabulary))
        _warn_of_positions(config)
        return train_native(draft, model, vocabulary, run.streams, config, seed, log)


def _warn_of_positions(config: LMConfig) -> None:
    """A model with absolute positions knows only those that it was trained on."""
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
    from gnnlm.gnn.options import resolve_options
    from gnnlm.retrieval.index import empty_index

    _warn_of_positions(run.config.lm)
    options = resolve_options(run.config.gnn, run.lm.width)  # what cannot work later is told before the long work
    if run.config.codec.kind == "pq":
        check_bytes(run.lm.width, run.config.codec.bytes, "codec.bytes")
    if run.config.cache.dtype == "pq":
        check_bytes(options.width, run.config.cache.bytes, "cache.bytes")
    empty_index(run.config.index, run.lm.width, run.streams["train"].token_count)
    return build_store(draft, run.streams, run.lm, run.config.lm, run.config.store)


def _build_codec(run: Run, draft: Draft) -> Artifact:
    from gnnlm.datastore.codec import build_codec

    return build_codec(draft, run.artifact("encode"), run.config.codec, run.config.seed)


def _build_index(run: Run, draft: Draft) -> Artifact:
    from gnnlm.retrieval.index import build_index

    return build_index(draft, run.artifact("encode"), run.streams["train"], run.config.index, run.config.seed)


def _build_neighbours(run: Run, draft: Draft) -> Artifact:
    from gnnlm.retrieval.index import open_index
    from gnnlm.retrieval.search import LeakageRule, build_neighbours

    config = run.config
    reach = max(config.gnn.left, config.gnn.right)
    store = run.artifact("encode")
    field = store.facts.get("receptive_field", config.lm.window)
    rule = LeakageRule(field, reach, config.search.exclude == "document")
    index = open_index(run.artifact("index"), config.index.probes)
    made = build_neighbours(
        draft,
        run.streams,
        store,
        index,
        config.search,
        rule,
        config.lm.continuous,
        run.unread_positions,
        run.unread_states,
    )
    for split, k in made.facts["k"].items():
        if k < (config.search.graph_k if split == "train" else config.search.k):
            warn(f"the store has only {len(index)} rows: {k} neighbours per {split} position")
        if made.facts["short_of_k"][split]:
            warn(f"{made.facts['short_of_k'][split]:,} {split} positions found fewer than {k} neighbours")
    return made


def _build_gnn(run: Run, draft: Draft) -> Artifact:
    import torch

    from gnnlm.gnn.model import GnnModel
    from gnnlm.gnn.options import resolve_options, similarity_best, similarity_unit
    from gnnlm.train.gnn import train_gnn
    from gnnlm.train.logging import tensorboard

    torch.manual_seed(run.config.seed)
    train = run.assembler("train")
    unit = similarity_unit(run.config.index.metric, train.similarity)
    best = similarity_best(run.config.index.metric)
    model = GnnModel(resolve_options(run.config.gnn, run.head.width, unit, best), run.head)
    model.checkpoint = run.config.train.checkpoint
    with tensorboard(run.root / "tensorboard") as log:
        return train_gnn(draft, model, run.head, train, run.assembler("valid"), run.config.train, run.config.seed, log)


def _build_cache(run: Run, draft: Draft) -> Artifact:
    from gnnlm.predict.cache import build_cache

    config = run.config
    return build_cache(draft, run.model, run.assembler("valid"), run.graph_k, config.cache, config.seed, run.device)


def _build_tuning(run: Run, draft: Draft) -> Artifact:
    from gnnlm.artifact import write_json
    from gnnlm.evaluate.score import score_rows
    from gnnlm.evaluate.tune import UNTUNED, default_temperatures, tune_mixes
    from gnnlm.predict.predictor import Predictor

    config, source = run.config, run.assembler("valid")
    predictor = Predictor(run.head, run.model, run.graph_k, UNTUNED, UNTUNED, run.cache)
    scores, _ = score_rows(predictor, source, config.eval.block, "score valid")
    scores = {name: scores[name] for name in ("base", "gnn")}
    temperatures = config.tune.temperatures or default_temperatures(config.index.metric, source.similarity)
    chosen, tables = tune_mixes(source, scores, config.tune.ks, temperatures, config.tune.lambdas, config.tune.buckets)
    write_json(draft.file("tuning.json"), tables)
    return draft.finish({"mix": {name: mix.as_dict() for name, mix in chosen.items()}})


def _build_report(run: Run, draft: Draft) -> Artifact:
    import json

    import numpy as np

    from gnnlm.artifact import write_json
    from gnnlm.evaluate.plots import plot_rows, plot_training
    from gnnlm.evaluate.report import make_report, markdown
    from gnnlm.evaluate.score import score_rows

    config, corpus, training = run.config, run.artifact("corpus").facts, run.artifact("train")
    stream = run.streams["test"]
    scores, seconds = score_rows(run.predictor, run.assembler("test"), config.eval.block, "score test")
    seconds["head"] /= 2  # the pass made two softmaxes and two mixes, a predictor needs one
    seconds["knn"] /= 2
    seconds["encode"] = run.artifact("encode").facts["seconds"]["test"]
    seconds["search"] = run.artifact("search").facts["seconds"]["test"]
    parts = {
        "base": ("encode", "head"),
        "knn": ("encode", "head", "search", "knn"),
        "gnn": ("encode", "head", "search", "gnn"),
        "gnn_knn": ("encode", "head", "search", "gnn", "knn"),
    }
    speeds = {name: stream.token_count / sum(seconds[part] for part in used) for name, used in parts.items()}
    has_token = np.asarray(stream.tokens) >= 0
    report = make_report(
        scores,
        stream.document_of(np.flatnonzero(has_token)),
        {"words": corpus["test"]["whitespace_words"], "bytes": corpus["test"]["bytes"]},
        speeds,
        config.eval.bootstrap,
        config.seed,
        store_tokens=run.streams["train"].token_count,
        model=config.lm.model,
        mix=run.artifact("tune").facts["mix"],
        lm=run.artifact("lm").facts if "lm" in run.stages else {"kind": "frozen"},
        overlap={split: corpus[split]["overlap"] for split in SPLITS},
        overlap_ngram=config.corpus.overlap_ngram,
        training=training.facts,
        codec=run.artifact("codec").facts,
        cache=run.artifact("cache").facts,
        seconds=seconds,
    )
    for name, values in scores.items():
        draft.save(f"{name}.log_probs.npy", values.astype(np.float32))
    write_json(draft.file("report.json"), report)
    draft.write_text("report.md", markdown(report))
    history = json.loads(training.text("history.json"))
    plot_rows(report, draft.file("rows.png"))
    plot_training(history, training.facts["best_step"], draft.file("training.png"))
    return draft.finish({"made": time.strftime("%Y-%m-%d %H:%M:%S")})


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("corpus", "corpus", (), _build_corpus, "Read, split, clean and tokenize the text."),
        Stage("lm", "lm", ("corpus",), _build_lm, "Train or fine-tune the base model."),
        Stage("encode", "store", ("corpus", "lm"), _build_store, "Turn every position into a state of the frozen LM."),
        Stage("codec", "codec", ("encode",), _build_codec, "Compress the states that neighbour nodes carry."),
        Stage("index", "index", ("corpus", "encode"), _build_index, "Index the train states for search."),
        Stage(
            "search",
            "neighbours",
            ("corpus", "encode", "index"),
            _build_neighbours,
            "Find the neighbours of every position.",
        ),
        Stage("train", "gnn", ("encode", "codec", "search"), _build_gnn, "Train the graph network."),
        Stage(
            "cache",
            "cache",
            ("encode", "codec", "search", "train"),
            _build_cache,
            "Store what the trained network reads of every row, so that scoring need not compute it.",
        ),
        Stage(
            "tune", "tuning", ("encode", "search", "train", "cache"), _build_tuning, "Choose k, T and lambda on valid."
        ),
        Stage(
            "eval",
            "report",
            ("encode", "search", "train", "cache", "tune"),
            _build_report,
            "Score test once and print the report.",
        ),
    )
}
