"""A run: the stages in order, what each is made from, and where it leaves its artifact.

This is the one place that knows all stages. A stage is done when its artifact is whole and was made from
the same inputs; a stage made from other inputs is refused, never silently remade.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft, State, differences, read_manifest, state_of
from gnnlm.artifact import manifest_fingerprint as fingerprint_of
from gnnlm.config import Config, dump_config
from gnnlm.corpus.stream import SPLITS
from gnnlm.errors import ArtifactError, CorpusError
from gnnlm.progress import say, warn

if TYPE_CHECKING:
    from gnnlm.corpus.stream import Stream
    from gnnlm.datastore.store import States
    from gnnlm.gnn.model import GnnModel
    from gnnlm.graph.assemble import Assembler
    from gnnlm.lm.head import SoftmaxHead
    from gnnlm.lm.hf import HFModel
    from gnnlm.predict.predictor import Predictor


@dataclass(frozen=True)
class Stage:
    name: str
    folder: str
    parents: tuple[str, ...]
    build: Callable[[Run, Draft], Artifact]


class Run:
    """A config and its run directory."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.root = Path(config.run)
        self._open: dict[str, Artifact] = {}
        self._own_inputs: dict[str, dict[str, Any]] = {}

    # -- state ---------------------------------------------------------------------------------------------

    def inputs(self, stage: Stage) -> dict[str, Any] | None:
        """What the stage would be made from now; None while a parent is not there."""
        if stage.name not in self._own_inputs:
            self._own_inputs[stage.name] = _OWN_INPUTS[stage.name](self)
        made_from = dict(self._own_inputs[stage.name])
        for parent in stage.parents:
            try:
                made_from[f"artifact {parent}"] = fingerprint_of(read_manifest(self.path(parent)))
            except ArtifactError:
                return None
        return made_from

    def state(self, stage: Stage) -> State:
        """Stale is what was made from other inputs, or hangs on something that is not done."""
        inputs = self.inputs(stage)
        if inputs is not None and all(self.state(STAGES[parent]) == "done" for parent in stage.parents):
            return state_of(self.path(stage.name), inputs)
        there = state_of(self.path(stage.name), {})
        return "stale" if there == "done" else there

    def path(self, name: str) -> Path:
        return self.root / STAGES[name].folder

    def artifact(self, name: str) -> Artifact:
        """The whole, verified and current artifact of a stage, everything it hangs on included."""
        if name not in self._open:
            stage = STAGES[name]
            for parent in stage.parents:
                self.artifact(parent)
            state = self.state(stage)
            if state in ("missing", "half-done"):
                raise ArtifactError(f"{self.path(name)} is {state}; make it first: gnnlm {name}, with the same config")
            artifact = Artifact.open(self.path(name))
            if state != "done":
                raise ArtifactError(self._mismatch(stage))
            self._open[name] = artifact
        return self._open[name]

    def _mismatch(self, stage: Stage) -> str:
        found = differences(read_manifest(self.path(stage.name))["inputs"], self.inputs(stage) or {})
        return (
            f"{self.path(stage.name)} was made from other inputs: {found}; replace it "
            f"with gnnlm {stage.name} and --rebuild, with the same config, or choose another run directory "
            "(run: in the config)"
        )

    # -- building ------------------------------------------------------------------------------------------

    def build(self, name: str, rebuild: bool = False) -> Artifact:
        """Make one stage, or find it done. With `rebuild`, make it even so."""
        stage = STAGES[name]
        for parent in stage.parents:
            self.artifact(parent)
        state = self.state(stage)
        if state == "done" and not rebuild:
            artifact = self.artifact(name)
            say(f"{name}: done already")
            return artifact
        if state in ("stale", "damaged") and not rebuild:
            Artifact.open(self.path(name))  # says what is wrong with it, if anything is
            raise ArtifactError(self._mismatch(stage))
        inputs = self.inputs(stage)
        assert inputs is not None
        with self._alone(), Draft(self.path(name), name, inputs, rebuild=rebuild) as draft:
            self._write_config()
            if draft.resumed:
                say(f"{name}: going on where it was interrupted")
            self._open[name] = stage.build(self, draft)
        return self._open[name]

    def build_all(self, rebuild: bool = False) -> Artifact:
        """Make every stage that is not done, and the report. With `rebuild`, replace what is stale or damaged."""
        for name in STAGES:
            artifact = self.build(name, rebuild=rebuild and not self._is_whole(name))
        return artifact

    def _is_whole(self, name: str) -> bool:
        try:
            self.artifact(name)
        except ArtifactError:
            return False
        return True

    def _write_config(self) -> None:
        beside = self.root / "config.yaml.new"
        beside.write_text(dump_config(self.config), encoding="utf-8")
        beside.replace(self.root / "config.yaml")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two processes that build in one run directory would tread on each other."""
        import fcntl

        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ArtifactError(
                    f"another gnnlm is building in {self.root}; wait for it, or choose another run directory"
                ) from None
            yield

    # -- parts, loaded when first needed -------------------------------------------------------------------

    @cached_property
    def lm(self) -> HFModel:
        from gnnlm.lm.hf import load_lm

        say(f"loading {self.config.lm.model}")
        return load_lm(self.config.lm)

    @cached_property
    def streams(self) -> dict[str, Stream]:
        from gnnlm.corpus.stream import Stream

        return {split: Stream(self.artifact("corpus"), split) for split in SPLITS}

    @cached_property
    def states(self) -> dict[str, States]:
        from gnnlm.datastore.store import States

        store = self.artifact("encode")
        return {split: States.open(store, stream) for split, stream in self.streams.items()}

    @cached_property
    def device(self) -> str:
        """Where the softmax and the GNN predict."""
        import torch

        return "cuda" if self.config.train.device == "auto" and torch.cuda.is_available() else "cpu"

    @cached_property
    def head(self) -> SoftmaxHead:
        from gnnlm.datastore.store import load_head

        return load_head(self.artifact("encode")).on(self.device)

    @cached_property
    def model(self) -> GnnModel:
        """The trained GNN."""
        from gnnlm.gnn.model import GnnModel

        return GnnModel.load(self.artifact("train").path / "model.safetensors", self.head.weight_VD).to(self.device)

    def assembler(self, split: str) -> Assembler:
        from gnnlm.graph.assemble import Assembler

        table = self.artifact("search")
        gnn = self.config.gnn
        ids, similarity = table.array(f"{split}.ids.npy"), table.array(f"{split}.similarity.npy")
        return Assembler(self.states[split], self.states["train"], ids, similarity, gnn.left, gnn.right)

    @property
    def predictor(self) -> Predictor:
        from gnnlm.predict.knn import Mix
        from gnnlm.predict.predictor import Predictor

        chosen = self.artifact("tune").facts["mix"]
        mixes = (Mix(**chosen["base"]), Mix(**chosen["gnn"]))
        return Predictor(self.head, self.model, self.graph_k, *mixes)

    @property
    def graph_k(self) -> int:
        """Neighbours per position in the graph when predicting."""
        return self.config.eval.graph_k or self.config.search.graph_k


# -- what each stage is made from, besides its parents -------------------------------------------------------


def _section(config: Any, prefix: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    return {f"{prefix}.{key}": value for key, value in config.model_dump(mode="json").items() if key not in skip}


def _corpus_inputs(run: Run) -> dict[str, Any]:
    from gnnlm.corpus.sources import source_fingerprint
    from gnnlm.lm.hf import model_fingerprint

    corpus = run.config.corpus
    sources = [corpus.source] if corpus.train is None else [corpus.train, corpus.valid, corpus.test]
    try:
        text = [source_fingerprint(source, leave_out=run.root) for source in sources if source]
    except CorpusError:
        if not (run.path("corpus") / "manifest.json").is_file():
            raise
        text = read_manifest(run.path("corpus"))["inputs"]["text"]  # the files are gone, what was made of them stands
    return {
        **_section(corpus, "corpus"),
        "seed": run.config.seed,
        "text": text,
        "lm.model": run.config.lm.model,
        "model files": model_fingerprint(run.config.lm.model),
    }


def _encode_inputs(run: Run) -> dict[str, Any]:
    lm = _section(run.config.lm, "lm", skip=("device",))
    return {**lm, **_section(run.config.store, "store")}


_OWN_INPUTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "corpus": _corpus_inputs,
    "encode": _encode_inputs,
    "index": lambda run: {**_section(run.config.index, "index", skip=("probes",)), "seed": run.config.seed},
    "search": lambda run: {
        **_section(run.config.search, "search"),
        "index.probes": run.config.index.probes,
        "lm.window": run.config.lm.window,
        "gnn.left": run.config.gnn.left,
        "gnn.right": run.config.gnn.right,
    },
    "train": lambda run: {
        **_section(run.config.gnn, "gnn"),
        **_section(run.config.train, "train", skip=("device",)),
        "seed": run.config.seed,
    },
    "tune": lambda run: {**_section(run.config.tune, "tune"), "graph k": run.graph_k},
    "eval": lambda run: {"eval.bootstrap": run.config.eval.bootstrap, "seed": run.config.seed},
}


# -- how each stage is built: wiring only ---------------------------------------------------------------------


def _build_corpus(run: Run, draft: Draft) -> Artifact:
    from gnnlm.corpus.build import build_corpus

    return build_corpus(draft, run.config.corpus, run.config.seed, run.lm.tokenize, run.lm.vocab_size)


def _build_store(run: Run, draft: Draft) -> Artifact:
    from gnnlm.datastore.encode import build_store

    return build_store(draft, run.streams, run.lm, run.config.lm, run.config.store)


def _build_index(run: Run, draft: Draft) -> Artifact:
    from gnnlm.retrieval.index import build_index

    return build_index(draft, run.artifact("encode"), run.streams["train"], run.config.index, run.config.seed)


def _build_neighbours(run: Run, draft: Draft) -> Artifact:
    from gnnlm.retrieval.index import open_index
    from gnnlm.retrieval.search import LeakageRule, build_neighbours

    config = run.config
    reach = max(config.gnn.left, config.gnn.right)
    rule = LeakageRule(config.lm.window, reach, config.search.exclude == "document")
    index = open_index(run.artifact("index"), config.index.probes)
    made = build_neighbours(draft, run.streams, run.artifact("encode"), index, config.search, rule)
    for split, k in made.facts["k"].items():
        if k < (config.search.graph_k if split == "train" else config.search.k):
            warn(f"the store has only {len(index)} rows: {k} neighbours per {split} position")
        if made.facts["short_of_k"][split]:
            warn(f"{made.facts['short_of_k'][split]:,} {split} positions found fewer than {k} neighbours")
    return made


def _build_gnn(run: Run, draft: Draft) -> Artifact:
    import torch

    from gnnlm.gnn.model import GnnModel
    from gnnlm.gnn.options import resolve_options, similarity_unit
    from gnnlm.train.logging import tensorboard
    from gnnlm.train.loop import train_gnn

    torch.manual_seed(run.config.seed)
    train = run.assembler("train")
    unit = similarity_unit(run.config.index.metric, train.similarity)
    model = GnnModel(resolve_options(run.config.gnn, run.head.width, unit), run.head.weight_VD.cpu())
    with tensorboard(run.root / "tensorboard") as log:
        return train_gnn(draft, model, run.head, train, run.assembler("valid"), run.config.train, run.config.seed, log)


def _build_tuning(run: Run, draft: Draft) -> Artifact:
    from gnnlm.artifact import write_json
    from gnnlm.evaluate.score import score_rows
    from gnnlm.evaluate.tune import UNTUNED, default_temperatures, tune_mixes
    from gnnlm.predict.predictor import Predictor

    config, source = run.config, run.assembler("valid")
    predictor = Predictor(run.head, run.model, run.graph_k, UNTUNED, UNTUNED)
    scores, _ = score_rows(predictor, source, config.eval.block, "score valid")
    scores = {name: scores[name] for name in ("base", "gnn")}
    temperatures = config.tune.temperatures or default_temperatures(config.index.metric, source.similarity)
    chosen, tables = tune_mixes(source, scores, config.tune.ks, temperatures, config.tune.lambdas)
    write_json(draft.folder / "tuning.json", tables)
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
        overlap={split: corpus[split]["overlap"] for split in SPLITS},
        overlap_ngram=config.corpus.overlap_ngram,
        training=training.facts,
        seconds=seconds,
    )
    for name, values in scores.items():
        draft.save(f"{name}.log_probs.npy", values.astype(np.float32))
    write_json(draft.folder / "report.json", report)
    draft.write_text("report.md", markdown(report))
    history = json.loads((training.path / "history.json").read_text(encoding="utf-8"))
    plot_rows(report, draft.folder / "rows.png")
    plot_training(history, training.facts["best_step"], draft.folder / "training.png")
    return draft.finish({"made": time.strftime("%Y-%m-%d %H:%M:%S")})


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("corpus", "corpus", (), _build_corpus),
        Stage("encode", "store", ("corpus",), _build_store),
        Stage("index", "index", ("corpus", "encode"), _build_index),
        Stage("search", "neighbours", ("corpus", "encode", "index"), _build_neighbours),
        Stage("train", "gnn", ("encode", "search"), _build_gnn),
        Stage("tune", "tuning", ("encode", "search", "train"), _build_tuning),
        Stage("eval", "report", ("encode", "search", "train", "tune"), _build_report),
    )
}
