"""The config sections of the graph network: its shape, its training, its cache."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gnnlm.config.config_section import MAX_K, MAX_STEPS, ConfigSection, TrainingSection, default

MAX_WIDTH, MAX_LAYERS, MAX_HEADS, MAX_REACH = 16_384, 64, 1024, 64


class GnnConfig(ConfigSection):
    preset: Literal["default", "paper", "released"] = Field(
        "default",
        description="The kind of network. `paper`: the equations as printed. `released`: the choices of the authors' "
        "code. `default`: what measured best. Fields below that are null follow the preset; so do search.exclude, "
        "tune.buckets and tune.gate.",
    )
    layers: int = Field(
        3,
        ge=0,
        le=MAX_LAYERS,
        description="Number of layers. 0: no graph network and nothing to train; the book then has base and +kNN only.",
    )
    heads: int | None = Field(
        None,
        ge=1,
        le=MAX_HEADS,
        description="Attention heads; must divide the width. Default: one per 64 of the width.",
    )
    width: int | None = Field(
        None, ge=1, le=MAX_WIDTH, description="Width of the network. Default: the width of the base model."
    )
    left: int = Field(1, ge=0, le=MAX_REACH, description="Positions to the left of a retrieved row in its window.")
    right: int = Field(
        1,
        ge=0,
        le=MAX_REACH,
        description="Positions to the right of a retrieved row in its window. The first of them has read the row's "
        "next token: with 0 the network does not see what it could copy.",
    )
    context: int = Field(
        128,
        ge=1,
        le=MAX_K,
        description="Tokens of its own document that a token attends to, itself included.",
    )
    dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout on what each layer adds to the context states."
    )
    attention_dropout: float | None = Field(None, ge=0, lt=1, description="Dropout on attention weights.")
    neighbour_dropout: float | None = Field(
        None, ge=0, lt=1, description="Dropout on what each layer adds to the states of neighbour nodes."
    )
    typed_input: bool | None = Field(
        None,
        description="With a width of its own: give context and neighbour nodes separate input projections.",
    )
    inter: Literal["window", "centre"] | None = Field(
        None, description="Which nodes of a window the context token attends to: all of them, or the centre only."
    )
    neighbour_updates: bool | None = Field(
        None, description="Update neighbour nodes in each layer, along the edges within their windows."
    )
    self_loops: bool | None = Field(None, description="Let neighbour nodes attend to themselves as well.")
    combine: Literal["sum", "mean"] | None = Field(
        None, description="How the messages of the two edge types, intra and inter, are combined."
    )
    norm: Literal["none", "pre", "post"] | None = Field(
        None, description="Layer normalisation: none, before each layer, or after it."
    )
    bias: bool | None = Field(None, description="Give the projections biases.")
    scale: Literal["width", "head"] | None = Field(
        None, description="Divide attention scores by the square root of the width, or of the width of a head."
    )
    mu: Literal["type", "head"] | None = Field(
        None,
        description="The learned factor mu of attention scores: one per (node type, edge type, node type), or one per "
        "(edge type, head).",
    )
    zero_start: bool | None = Field(
        None, description="Start the output projections at zero, so that the untrained network is the base model."
    )
    edge_bias: bool | None = Field(
        None, description="Add a learned bias to the scores of inter edges, by window position and similarity."
    )
    token_features: bool | None = Field(
        None, description="Give window nodes the embedding of their own token beside their state."
    )
    copying: bool | None = Field(
        None,
        description="Start layers as copiers of their neighbours' tokens behind a gate that is closed at first, and "
        "opens wider the nearer the nearest neighbour is. Learns from far less text. Needs token_features, edge_bias "
        "and the width of the base model.",
    )


class Phase(ConfigSection):
    k: int = Field(description="Neighbours per token in this phase.", ge=1, le=MAX_K)
    steps: int = Field(description="Optimizer steps in this phase.", ge=1, le=MAX_STEPS)


class TrainConfig(TrainingSection):
    curriculum: tuple[Phase, ...] = Field(
        (Phase(k=32, steps=300), Phase(k=128, steps=60)),
        min_length=1,
        max_length=1000,
        description="Phases of training, each with its number of neighbours (k) and of optimizer steps. The paper "
        "trains with k = 32 first, then with k = 128. Larger k is slower.",
    )
    optimizer: Literal["adamw", "adam"] = Field("adamw", description="`adamw`, or `adam`, which has no weight decay.")
    lr: float = default(TrainingSection, "lr", 5e-4)
    weight_decay: float = default(TrainingSection, "weight_decay", 0.05)
    warmup: int = default(TrainingSection, "warmup", 20)
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="How the learning rate falls after the warm-up."
    )
    clip: float = default(TrainingSection, "clip", 1.0)
    block: int = Field(128, ge=1, le=MAX_K, description="Consecutive positions that form a block of training text.")
    batch_blocks: int = Field(4, ge=1, le=4096, description="Blocks in a forward pass. Lower it to save memory.")
    validate_every: int = default(TrainingSection, "validate_every", 50)
    valid_tokens: int = default(TrainingSection, "valid_tokens", 8192)
    patience: int = default(TrainingSection, "patience", 4)
    checkpoint: bool = Field(
        False,
        description="Compute window states again in the backward pass instead of keeping them: slower, with far less "
        "memory at large k.",
    )
    device: Literal["auto", "cpu"] = Field(
        "auto", description="Where the GNN is trained and used: `auto` takes a GPU if there is one; or `cpu`."
    )

    @model_validator(mode="after")
    def _bounded(self) -> TrainConfig:
        steps = sum(phase.steps for phase in self.curriculum)
        if steps > MAX_STEPS:
            raise ValueError(f"the phases of curriculum have {steps:,} steps together; expected at most {MAX_STEPS:,}")
        return self


class CacheConfig(ConfigSection):
    form: Literal["auto", "none", "states", "projected"] = Field(
        "auto",
        description="What the trained GNN reads of its neighbours when it predicts: their `states`, or `projected` "
        "keys and values, computed once for every row and kept; or `none`, computed again for each batch. `auto` "
        "times all three on a few tokens and takes the fastest within the limit.",
    )
    dtype: Literal["fp32", "fp16", "pq"] = Field(
        "fp16", description="Number format of the cache. `pq` compresses to a few bytes and is for `states` only."
    )
    bytes: int = Field(64, ge=1, le=65_536, description="Bytes per state under `pq`; must divide the GNN's width.")
    limit_gb: float = Field(
        4.0, ge=0, le=1_000_000, description="The largest cache, in gigabytes, that `auto` may choose."
    )

    @model_validator(mode="after")
    def _states_only(self) -> CacheConfig:
        if self.dtype == "pq" and self.form == "projected":
            raise ValueError("dtype pq is for form states (got projected); set dtype to fp16 or fp32")
        return self
