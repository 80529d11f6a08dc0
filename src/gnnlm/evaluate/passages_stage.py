"""The passages stage, in runs that ask for it: the base model reads test with retrieved passages before the text."""

from __future__ import annotations

from typing import Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import Config
from gnnlm.stage import BuildContext, InputFacts, Stage, section_inputs


class PassagesStage(Stage):
    name = "passages"
    folder = "passages"
    parents = ("corpus", "lm", "encode")
    help = "Read test with retrieved passages before the text, to compare (eval.context_retrieval)."

    def is_in(self, config: Config) -> bool:
        return config.eval.context_retrieval.enabled

    def absence(self, config: Config) -> str:
        return "this run does not compare with passages; set eval.context_retrieval to true"

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        return section_inputs(config.eval.context_retrieval, "eval.context_retrieval", skip=("enabled",))

    def check(self, config: Config, width: int, rows: int) -> None:
        from gnnlm.retrieval.bm25 import open_bm25

        if self.is_in(config):
            open_bm25()

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        from gnnlm.evaluate.context_retrieval import build_passages

        snapshot = context.snapshot
        encoded = snapshot.artifact("encode")
        return build_passages(draft, snapshot.streams, snapshot.lm, snapshot.head, encoded, context.config)


PASSAGES = PassagesStage()
