"""The encode stage: the frozen base model turns every position into a state; the softmax is stored with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Artifact, Draft
from gnnlm.config import Config
from gnnlm.engine import Work
from gnnlm.stage import BuildContext, InputFacts, SegmentSource, Stage, section_inputs

if TYPE_CHECKING:
    from gnnlm.datastore.encode import Encoder
    from gnnlm.datastore.store import Store
    from gnnlm.lm.head import Head
    from gnnlm.run.snapshot import Snapshot


class EncodeStage(Stage):
    name = "encode"
    folder = "store"
    parents = ("corpus", "lm")
    help = "Turn every position into a state of the frozen LM."
    part = "states"
    tasks = ("encode",)
    reads_model = True

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        lm = section_inputs(config.lm, "lm", skip=("model", "device", "architecture", "train", "finetune"))
        return {**lm, **section_inputs(config.store, "store", skip=("segment_tokens",))}

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        from gnnlm.datastore.encode import build_store
        from gnnlm.lm.architecture import warn_of_positions

        config, snapshot = context.config, context.snapshot
        lm, streams = snapshot.lm, snapshot.streams
        warn_of_positions(config.lm)
        for stage in context.stages:
            stage.check(config, lm.width, streams["train"].token_count)
        made_from = reading_inputs(snapshot, draft.inputs)
        return build_store(draft, streams, lm, config.lm, config.store, made_from, context.spread)

    def work(self, snapshot: Snapshot, inputs: Mapping[str, Any], kind: str) -> Work:
        from gnnlm.datastore.encode import states_work

        return states_work(snapshot.encoder, snapshot.streams)

    def part_inputs(self, snapshot: Snapshot, source: SegmentSource) -> dict[str, Any]:
        from gnnlm.datastore.encode import states_inputs

        made_from = reading_inputs(snapshot, snapshot.trained(self.name).inputs)
        before = [source.stream.fingerprint] if snapshot.config.lm.continuous else None
        return states_inputs(made_from, source.stream, before)

    def write_part(self, snapshot: Snapshot, source: SegmentSource, draft: Draft) -> Mapping[str, Any]:
        from gnnlm.datastore.encode import SegmentStates

        states = SegmentStates(snapshot.encoder, source.stream)
        seconds = states.write(draft, "encode train", "tokens")
        return {"positions": states.rows, "seconds": seconds}

    def load(self, snapshot: Snapshot) -> dict[str, Store]:
        """Return every split as it was encoded."""
        from gnnlm.datastore.store import Store

        encoded = snapshot.artifact(self.name)
        return {split: Store.open(encoded, stream) for split, stream in snapshot.streams.items()}

    def load_encoder(self, snapshot: Snapshot) -> Encoder:
        from gnnlm.datastore.encode import Encoder

        return Encoder(snapshot.lm, snapshot.config.lm, snapshot.config.store)

    def load_head(self, snapshot: Snapshot) -> Head:
        from gnnlm.lm.adaptive_softmax import load_head

        return load_head(snapshot.trained(self.name).file("head.safetensors")).on(snapshot.device)


def reading_inputs(snapshot: Snapshot, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return which model reads in which way, from the inputs of the stage; with a text, they determine its states."""
    made_from = {name: value for name, value in inputs.items() if name != "artifact corpus"}
    return {**made_from, "model files": snapshot.trained("corpus").inputs["model files"]}


ENCODE = EncodeStage()
