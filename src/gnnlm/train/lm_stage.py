"""The lm stage, in runs that ask for it: a base model is trained or fine-tuned on the train text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gnnlm.artifact import Array, Artifact, Draft
from gnnlm.config import SCRATCH, Config
from gnnlm.errors import ModelError
from gnnlm.progress import say
from gnnlm.stage import BuildContext, InputFacts, Stage, section_inputs

if TYPE_CHECKING:
    from gnnlm.lm.base_lm import BaseLM
    from gnnlm.run.snapshot import Snapshot


class LMStage(Stage):
    name = "lm"
    folder = "lm"
    parents = ("corpus",)
    help = "Train or fine-tune the base model."
    trains = True

    def is_in(self, config: Config) -> bool:
        return config.lm.is_trained

    def absence(self, config: Config) -> str:
        return (
            "this run uses its base model without training; set lm.model to scratch, or lm.finetune.kind to full or "
            "lora"
        )

    def command(self, config: Config) -> str:
        return "lm train" if config.lm.model == SCRATCH else "lm finetune"

    def inputs(self, config: Config, known: InputFacts) -> dict[str, Any]:
        from gnnlm.config import flat

        lm = config.lm
        shared = {"lm.continuous": lm.continuous, "seed": config.seed}
        if lm.model != SCRATCH:
            return {**section_inputs(lm.finetune, "lm.finetune"), **shared}
        from gnnlm.lm.architecture import resolve_architecture

        kind, options = resolve_architecture(lm.architecture, known.parents["corpus"]["vocabulary"]["size"])
        architecture = flat({"kind": kind, **options.as_dict()}, "lm.architecture.")
        return {**architecture, **section_inputs(lm.train, "lm.train"), **shared}

    def build(self, context: BuildContext, draft: Draft) -> Artifact:
        import torch

        from gnnlm.corpus.vocabulary import load_vocabulary
        from gnnlm.lm.architecture import build_model, warn_of_positions
        from gnnlm.lm.hf_model import HFModel
        from gnnlm.lm.load_lm import usable_device
        from gnnlm.train.finetune import finetune_hf
        from gnnlm.train.processes import here
        from gnnlm.train.tensorboard import tensorboard
        from gnnlm.train.train_lm import train_native
        from gnnlm.train.training_loop import training_setup

        config, snapshot = context.config.lm, context.snapshot
        device = torch.device(usable_device(config.device))
        if device.index is not None and here().count == 1:  # of several processes, each has its own
            torch.cuda.set_device(device)
        with tensorboard(snapshot.root / "tensorboard" / "lm") as log:
            setup = training_setup(context, draft, log, config.device)
            if config.model != SCRATCH:
                model = snapshot.source_lm
                if not isinstance(model, HFModel):
                    raise ModelError(
                        "lm.finetune works with Hugging Face models only; to train a native model, set lm.model to "
                        "scratch"
                    )
                return finetune_hf(setup, model, snapshot.streams, config.finetune)
            vocabulary = load_vocabulary(snapshot.artifact("corpus").path)
            assert vocabulary is not None
            torch.manual_seed(context.config.seed)
            native = build_model(config.architecture, len(vocabulary))
            warn_of_positions(config)
            return train_native(setup, native, vocabulary, snapshot.streams, config)

    def load_source(self, snapshot: Snapshot) -> BaseLM:
        """Load the model that the config names."""
        from gnnlm.lm.load_lm import load_lm

        say(f"loading {snapshot.config.lm.model}")
        return load_lm(snapshot.config.lm)

    def load(self, snapshot: Snapshot) -> BaseLM:
        """Load the frozen base model: the one that the config names, or the one trained in this run."""
        from gnnlm.lm.load_lm import load_lm

        if not snapshot.has(self.name):
            return snapshot.source_lm
        made = snapshot.artifact(self.name)
        lm = load_lm(snapshot.config.lm.model_copy(update={"model": str(made.path)}))
        made.check_in_place()  # it was read by path: refuse if another build has replaced it
        return lm

    def first_reading(self, snapshot: Snapshot, what: str) -> Array | None:
        """Return the `states` or `positions` that the model read before it was trained on them; None if not kept."""
        if not snapshot.has(self.name):
            return None
        made = snapshot.artifact(self.name)
        files: Mapping[str, str] | None = made.facts.get("first_reading")
        return None if files is None else made.array(files[what])

    def unread_documents(self, snapshot: Snapshot) -> list[int]:
        """Return the train documents that the base model was not trained on, where only some were."""
        if not snapshot.has(self.name):
            return []
        found: list[int] | None = snapshot.artifact(self.name).facts.get("unread")
        return found or []

    def memory_of_text(self, snapshot: Snapshot, artifact: Artifact, refitted: bool) -> str:
        return "the base model was trained on the corpus"


LM = LMStage()
