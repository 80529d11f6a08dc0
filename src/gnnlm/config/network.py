"""The config sections of the graph network: its shape, its training, its cache."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gnnlm.config.section import Section, Training, default


class GnnConfig(Section):
    preset: Literal["default", "paper", "released"] = Field(
        "default",
        description="`paper`: the equations as printed. `released`: the public code's choices. `default`: what "
        "measures best. Each field below that is null takes the preset's value.",
    )
    layers: int = Field(
        3, ge=0, description="GNN layers. 0: no graph network and no training; the book then predicts with kNN alone."
    )
    heads: int | None = Field(None, gt=0, description="Attention heads. Default: one per 64 of the width.")
    width: int | None = Field(None, gt=0, description="Width of the GNN. Default: the base model's.")
    left: int = Field(1, ge=0, description="Window nodes left of a row.")
    right: int = Field(1, ge=0, description="Window nodes right of a row; the first one has read the row's token.")
    context: int = Field(128, gt=0, description="Tokens of its document that a token attends to, itself included.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout on what a layer adds to context states.")
    inter: Literal["window", "centre"] | None = Field(None, description="Which window nodes lead to the context token.")
    neighbour_updates: bool | None = Field(None, description="Neighbour nodes are updated along their intra edges.")
    self_loops: bool | None = Field(None, description="Neighbour nodes attend to themselves as well.")
    combine: Literal["sum", "mean"] | None = Field(None, description="How the two edge types are joined.")
    norm: Literal["none", "pre", "post"] | None = Field(None, description="Where states are normalised.")
    bias: bool | None = Field(None, description="Biases in the projections.")
    scale: Literal["width", "head"] | None = Field(None, description="Scores over the root of the width or of a head.")
    mu: Literal["type", "head"] | None = Field(None, description="mu per (type, edge, type) or per (edge, head).")
    zero_start: bool | None = Field(None, description="Output projections start at zero: step 0 is the base model.")
    edge_bias: bool | None = Field(None, description="Learned bias on inter edges per window slot and similarity.")
    token_features: bool | None = Field(None, description="Window nodes also carry their own token's embedding.")
    copying: bool | None = Field(
        None,
        description="Layers start as copiers of their neighbours' tokens behind a closed gate, and open it the wider "
        "the nearer the nearest neighbour is. Learns from far less text.",
    )


class Phase(Section):
    k: int = Field(description="Neighbours per token in this phase.", gt=0)
    steps: int = Field(description="Optimizer steps in this phase.", gt=0)


class TrainConfig(Training):
    curriculum: tuple[Phase, ...] = Field(
        (Phase(k=32, steps=300), Phase(k=128, steps=60)),
        min_length=1,
        description="Phases of (k, steps); the paper trains with k = 32, then with k = 128.",
    )
    optimizer: Literal["adamw", "adam"] = Field("adamw", description="adam has no weight decay.")
    lr: float = default(Training, "lr", 5e-4)
    weight_decay: float = default(Training, "weight_decay", 0.05)
    warmup: int = default(Training, "warmup", 20)
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Decay after the warm-up.")
    clip: float = default(Training, "clip", 1.0)
    block: int = Field(128, gt=0, description="Consecutive positions in a block.")
    batch_blocks: int = Field(4, gt=0, description="Blocks in a forward pass.")
    validate_every: int = default(Training, "validate_every", 50)
    valid_tokens: int = default(Training, "valid_tokens", 8192)
    patience: int = default(Training, "patience", 4)
    checkpoint: bool = Field(
        False, description="Compute window states anew in the backward pass: slower, and far less memory at large k."
    )
    device: Literal["auto", "cpu"] = Field("auto", description="`auto` lets accelerate choose.")


class CacheConfig(Section):
    form: Literal["auto", "none", "states", "projected"] = Field(
        "auto",
        description="What a trained GNN reads of its neighbours: `states` or `projected` keys and values of every row, "
        "computed once; `none`: computed anew for each batch. `auto` tries all on a few tokens and takes the fastest "
        "that stays within the limit.",
    )
    dtype: Literal["fp32", "fp16", "pq"] = Field("fp16", description="How it is kept; `pq` is for states only.")
    bytes: int = Field(64, gt=0, description="Bytes of a state under `pq`; must divide the GNN's width.")
    limit_gb: float = Field(4.0, ge=0, description="`auto` chooses nothing larger than this many GB.")

    @model_validator(mode="after")
    def _states_only(self) -> CacheConfig:
        if self.dtype == "pq" and self.form == "projected":
            raise ValueError("dtype pq is for form states; keep projected keys and values as fp16 or fp32")
        return self
