"""The sections of a config: every field typed, documented and checked.

Knows nothing of what the stages do with the values; how a config is read is in `config.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A group of fields; frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


SCRATCH = "scratch"
BENCHMARK_NAMES = ("wikitext-103", "wikitext-2", "one-billion-word", "enwik8")


class CorpusConfig(Section):
    source: str | None = Field(
        "python-docs",
        description="A file or folder of .txt, .md, .rst or .jsonl (or .gz of these), split by document; "
        "`python-docs`, the documentation of the Python that runs; or a benchmark, split as published: "
        "`wikitext-103`, `wikitext-2`, `one-billion-word`, `enwik8`. Null when train, valid and test are given.",
    )
    data_dir: str | None = Field(
        None,
        description="The folder of a benchmark's official files (without it they come from the Hugging Face hub); for "
        "other sources, where relative paths start from. --data-dir sets it.",
    )
    dataset: str | None = Field(
        None,
        description="A Hugging Face dataset instead of a source: a name on the hub or a local path; train, valid and "
        "test then name its splits (default: train, validation, test).",
    )
    dataset_config: str | None = Field(None, description="The dataset's configuration, where it has several.")
    text_column: str = Field("text", description="The dataset's column that holds the text.")
    train: str | None = Field(None, description="File or folder of the train split, when the splits are your own.")
    valid: str | None = Field(None, description="File or folder of the valid split.")
    test: str | None = Field(None, description="File or folder of the test split.")
    documents: Literal["files", "lines"] = Field(
        "files", description="What of a text file is a document: the file, or every line by itself."
    )
    tokens: Literal["lm", "words", "bytes"] = Field(
        "lm",
        description="The base model's own tokens; or, for a model from scratch, words between spaces (each line "
        "ends in `<eos>`), in a vocabulary made from train, or the bytes that occur.",
    )
    min_count: int = Field(1, gt=0, description="A word that train has less often is `<unk>`.")
    encoding: str = Field("utf-8", description="Text encoding of the files.")
    skip_unreadable: bool = Field(False, description="Leave out files that cannot be decoded, with a warning.")
    valid_share: float = Field(0.1, gt=0, lt=1, description="Share of the documents that goes to valid.")
    test_share: float = Field(0.1, gt=0, lt=1, description="Share of the documents that goes to test.")
    max_train_tokens: int | None = Field(None, gt=0, description="Stop adding train documents at this many tokens.")
    max_valid_tokens: int | None = Field(None, gt=0, description="Stop adding valid documents at this many tokens.")
    max_test_tokens: int | None = Field(None, gt=0, description="Stop adding test documents at this many tokens.")
    max_document_tokens: int | None = Field(None, gt=1, description="Cut longer documents to this many tokens.")
    overlap: Literal["drop", "count", "skip"] | None = Field(
        None,
        description="What becomes of text of valid and test that stands in an earlier split: it is dropped, or only "
        "counted, or not looked for. Default: drop; for a benchmark, whose splits are kept as published, skip.",
    )
    overlap_ngram: int = Field(8, gt=1, description="Words in the n-grams that tell whether text stands twice.")
    overlap_limit: float = Field(
        0.5,
        gt=0,
        le=1,
        description="A paragraph of valid or test is dropped when at least this share of its n-grams occurs in an "
        "earlier split.",
    )
    drop_train_duplicates: bool = Field(
        False,
        description="Drop, by the same rule, train paragraphs that repeat another train document. A store with "
        "copies teaches the GNN to trust copies that held-out text does not have.",
    )

    @model_validator(mode="after")
    def _one_way_to_split(self) -> CorpusConfig:
        given = [name for name in ("train", "valid", "test") if getattr(self, name) is not None]
        own_source = self.source not in (None, "python-docs")
        if given and len(given) < 3 and self.dataset is None:
            raise ValueError(f"give train, valid and test together (got only {', '.join(given)})")
        if self.dataset is not None and own_source:
            raise ValueError("give either source or dataset, not both")
        if given and own_source and not self.is_benchmark:
            raise ValueError("give either source or train, valid and test, not both")
        if not given and self.source is None and self.dataset is None:
            raise ValueError("give source, dataset, or train, valid and test")
        if self.is_benchmark and self.overlap == "drop":
            raise ValueError("a benchmark's splits are kept as published: overlap can be count or skip")
        if self.valid_share + self.test_share >= 1:
            raise ValueError("valid_share + test_share must leave something for train")
        return self

    @property
    def is_benchmark(self) -> bool:
        return self.source in BENCHMARK_NAMES

    @property
    def overlap_rule(self) -> str:
        return self.overlap or ("skip" if self.is_benchmark else "drop")


class Training(Section):
    """What every training has in common."""

    betas: tuple[float, float] = Field((0.9, 0.98), description="Adam's betas.")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Arithmetic of training.")

    @model_validator(mode="after")
    def _betas_in_range(self) -> Training:
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in 0..1, 1 excluded (got {self.betas})")
        return self


class StoreConfig(Section):
    dtype: Literal["fp16", "fp32"] = Field("fp16", description="How states are kept on disk.")
    key: Literal["state", "ffn_input"] = Field(
        "state",
        description="What is searched by: the state, or the input of the last feed-forward layer (kNN-LM's choice), "
        "kept beside it.",
    )
    shard_tokens: int = Field(8192, gt=0, description="Positions encoded between two points of resumption.")


class CodecConfig(Section):
    kind: Literal["fp16", "pq"] = Field(
        "fp16",
        description="How neighbour nodes keep their states: the store as it is, or product-quantized (OPQ + PQ). "
        "Context nodes and the index are always exact.",
    )
    bytes: int = Field(64, gt=0, description="Bytes of a state under `pq`; must divide the model's width.")
    train_rows: int = Field(32_768, ge=256, description="States that `pq` is learned from, drawn from the whole store.")


class IndexConfig(Section):
    metric: Literal["cosine", "l2"] = Field("cosine", description="Similarity: cosine, or minus the squared L2.")
    kind: str = Field(
        "exact",
        description="`exact`, `ivf`, `ivfpq` (keys of a few bytes, as in the paper), or any FAISS factory string.",
    )
    bytes: int = Field(64, gt=0, description="Bytes of a key under `ivfpq`; must divide the key's width.")
    clusters: int | None = Field(
        None, gt=0, description="Clusters of `ivf` and `ivfpq`. Default: 4 x the root of the rows."
    )
    probes: int = Field(32, gt=0, description="Clusters looked into per query.")


class SearchConfig(Section):
    k: int = Field(1024, gt=0, description="Neighbours per valid and test position, for the kNN distribution.")
    graph_k: int = Field(128, gt=0, description="Neighbours per position that enter the graph.")
    max_train: int | None = Field(
        None, gt=0, description="Train positions that are looked up, the first ones; the GNN learns on these alone."
    )
    exclude: Literal["receptive-field", "document"] = Field(
        "document",
        description="What a train position may not retrieve: rows whose window touches its receptive field (the "
        "paper), or its whole document as well, which is what held-out text meets.",
    )
    shard_queries: int = Field(4096, gt=0, description="Queries between two points of resumption.")

    @model_validator(mode="after")
    def _graph_within_k(self) -> SearchConfig:
        if self.graph_k > self.k:
            raise ValueError(f"graph_k must be at most k (got {self.graph_k} and {self.k})")
        return self


class GnnConfig(Section):
    preset: Literal["default", "paper", "released"] = Field(
        "default",
        description="`paper`: the equations as printed. `released`: the public code's choices. `default`: what "
        "measures best. Each field below that is null takes the preset's value.",
    )
    layers: int = Field(3, gt=0, description="GNN layers.")
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
    lr: float = Field(5e-4, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(
        0.05, ge=0, description="AdamW's weight decay, on parameters of two or more dimensions."
    )
    warmup: int = Field(20, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Decay after the warm-up.")
    clip: float = Field(1.0, gt=0, description="Gradient norm is clipped to this.")
    block: int = Field(128, gt=0, description="Consecutive positions in a block.")
    batch_blocks: int = Field(4, gt=0, description="Blocks in a forward pass.")
    accumulate: int = Field(1, gt=0, description="Forward passes in a step.")
    validate_every: int = Field(50, gt=0, description="Steps between validations, which are also checkpoints.")
    valid_tokens: int = Field(8192, gt=0, description="Valid positions looked at while training.")
    patience: int = Field(4, gt=0, description="Stop after this many validations without a better one.")
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


class TuneConfig(Section):
    ks: tuple[int, ...] = Field(
        (8, 16, 32, 64, 128, 256, 512, 1024), min_length=1, description="Numbers of neighbours tried (up to search.k)."
    )
    temperatures: tuple[float, ...] | None = Field(
        None, min_length=1, description="Temperatures tried. Default: a grid that suits the metric."
    )
    lambdas: tuple[float, ...] = Field(
        tuple(round(0.025 * i, 3) for i in range(33)), min_length=1, description="Weights of the kNN part tried."
    )
    buckets: int = Field(
        8,
        gt=0,
        description="Positions are put into so many buckets by the similarity of their nearest neighbour, and each has "
        "a weight of its own (fewer where valid has not 200 for each). The paper has one weight for all: 1.",
    )

    @model_validator(mode="after")
    def _in_range(self) -> TuneConfig:
        if any(k < 1 for k in self.ks):
            raise ValueError(f"ks must be at least 1 (got {self.ks})")
        if any(not 0 <= lam <= 1 for lam in self.lambdas):
            raise ValueError(f"lambdas must lie in 0..1 (got {self.lambdas})")
        if any(t <= 0 for t in self.temperatures or ()):
            raise ValueError(f"temperatures must be above 0 (got {self.temperatures})")
        return self


class EvalConfig(Section):
    bootstrap: int = Field(1000, gt=0, description="Resamplings of documents for the 95% interval.")
    block: int = Field(256, gt=0, description="Positions scored at once; does not change any result.")
    graph_k: int | None = Field(
        None, gt=0, description="Neighbours per position in the graph when predicting. Default: search.graph_k."
    )
