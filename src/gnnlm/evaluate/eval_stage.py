"""The eval stage: test is scored once, and the report is written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import Config
from gnnlm.engine import Work
from gnnlm.stage import BuildContext, InputFacts, Stage

if TYPE_CHECKING:
    from gnnlm.run.snapshot import Snapshot


class EvalStage(Stage):
    name = "eval"
    folder = "report"
    parents = ("encode", "search", "train", "cache", "tune", "passages")
    help = "Score test once and print the report."
    tasks = ("score",)

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        return {"eval.bootstrap": config.eval.bootstrap, "seed": config.seed}

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        from gnnlm.evaluate.evaluation import Evaluation, build_report
        from gnnlm.evaluate.passage_rows import PassageInputs

        config, snapshot = context.config, context.snapshot

        def optional(name: str) -> Artifact | None:
            return snapshot.artifact(name) if snapshot.has(name) else None

        read = optional("passages")
        passages = None
        if read is not None:
            passages = PassageInputs(
                read,
                snapshot.streams,
                snapshot.index,
                config.search.k,
                config.search.shard_queries,
                config.tune,
                config.buckets,
            )
        evaluation = Evaluation(
            snapshot.predictor,
            snapshot.searched("test"),
            snapshot.streams["test"],
            corpus=snapshot.artifact("corpus"),
            encoded=snapshot.artifact("encode"),
            indexed=snapshot.artifact("index"),
            searched=snapshot.artifact("search"),
            codec=snapshot.artifact("codec"),
            tuned=snapshot.artifact("tune"),
            model=config.lm.model,
            lm=optional("lm"),
            training=optional("train"),
            cache=optional("cache"),
            passages=passages,
        )
        return build_report(draft, evaluation, config.eval, config.corpus.overlap_ngram, config.seed, context.spread)

    def work(self, snapshot: Snapshot, inputs: Mapping[str, Any], kind: str) -> Work:
        from gnnlm.predict.split_scoring import score_blocks

        return partial(score_blocks, snapshot.predictor, snapshot.searched("test"))

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        return "figures made with it"


EVAL = EvalStage()
