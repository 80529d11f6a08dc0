"""The tune stage: the weights of p_kNN are chosen on valid; with them, the predictor is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft, write_json
from gnnlm.config import Config
from gnnlm.config.evaluation_config import COSINE_TEMPERATURES, L2_TEMPERATURES
from gnnlm.engine import Work
from gnnlm.progress import say
from gnnlm.stage import BuildContext, InputFacts, Stage, section_inputs

if TYPE_CHECKING:
    from gnnlm.predict.predictor import Predictor
    from gnnlm.run.snapshot import Snapshot


class TuneStage(Stage):
    name = "tune"
    folder = "tune"
    parents = ("encode", "search", "train", "cache")
    help = "Choose k, T and lambda on valid."
    tasks = ("score",)

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        grid = COSINE_TEMPERATURES if config.index.metric == "cosine" else ["units of l2", *L2_TEMPERATURES]
        section = section_inputs(config.tune, "tune", skip=("temperatures", "gate"))
        if config.gate:
            section["tune.gate"] = True
        resolved = {"tune.temperatures": config.tune.temperatures or grid, "tune.buckets": config.buckets}
        return {**section, **resolved, "graph k": config.graph_k}

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        from gnnlm.evaluate.tune import grid_of, losses_of, tune
        from gnnlm.predict.predictor import perplexity
        from gnnlm.predict.split_scoring import score_surely

        config, snapshot = context.config, context.snapshot
        valid, predictor = snapshot.searched("valid"), snapshot.predictor_with({})
        wanted = ("base",) if predictor.gnn is None else ("base", "gnn")
        asked = wanted if config.gate else ()
        block, spread = config.eval.block, context.spread
        scored = score_surely(predictor, valid, block, "score valid", wanted, asked, draft=draft, spread=spread)
        grid = grid_of(config.tune, config.buckets, config.index.metric, valid.table.similarity)
        tuned = tune(valid, snapshot.store, scored, grid, config.gate)
        write_json(draft.file("tuning.json"), asdict(tuned.table))
        for name, choice in tuned.variants.items():
            ppls = ", ".join(f"{variant} {perplexity(loss):.3f}" for variant, loss in choice.losses.items())
            say(f"tune: cross-validated perplexity of {name} with {ppls}; {choice.best} is used")
        facts: dict[str, Any] = {
            "mix": {name: mix.as_dict() for name, mix in tuned.mixes.items()},
            "valid_loss": losses_of(valid, snapshot.store, scored, tuned.mixes),
        }
        if tuned.variants:
            facts["variants"] = {name: choice.as_dict() for name, choice in tuned.variants.items()}
        return draft.finish(facts)

    def work(self, snapshot: Snapshot, inputs: Mapping[str, Any], kind: str) -> Work:
        from gnnlm.predict.split_scoring import score_blocks

        return partial(score_blocks, snapshot.predictor_with({}), snapshot.searched("valid"))

    def load(self, snapshot: Snapshot) -> Predictor:
        """Return the tuned predictor."""
        from gnnlm.predict.knn import Mix

        chosen: Mapping[str, Any] = snapshot.trained(self.name).facts["mix"]
        return snapshot.predictor_with({name: Mix.of(values) for name, values in chosen.items()})

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        return "the mix, fitted again" if refitted else "figures made with it"


TUNE = TuneStage()
