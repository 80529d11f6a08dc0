"""How large a run is: its models' parameters and widths, its text, and what is done of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gnnlm.config import SCRATCH, Config
from gnnlm.corpus.stream import SPLITS
from gnnlm.errors import ConfigError

if TYPE_CHECKING:
    from gnnlm.run import Run


@dataclass(frozen=True)
class Description:
    """The sizes of a base model and of its graph network."""

    parameters: int
    gnn_parameters: int
    receptive_field: int
    width: int
    gnn_width: int
    vocabulary: int
    layers: int
    head_parameters: int

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


def describe_store(run: Run) -> Description:
    """What the store tells of the base model, which is not loaded for this: everything but its own size."""
    facts, gnn = run.artifact("encode").facts, run.config.gnn
    width, vocabulary = int(facts["width"]), int(facts["vocab_size"])
    return Description(
        parameters=0,
        gnn_parameters=network_parameters(run.config, width),
        receptive_field=int(facts["receptive_field"]),
        width=width,
        gnn_width=gnn.width or width,
        vocabulary=vocabulary,
        layers=0,
        head_parameters=vocabulary * width,
    )


def describe(run: Run, whole_model: bool = True) -> Description:
    """Count parameters; a model that is still to be trained is not allocated for this.

    Unless the `whole_model` matters, a finished store is asked first, so that no model is loaded.
    """
    import torch

    from gnnlm.lm.architecture import build_model

    config = run.config
    if not whole_model and "encode" in done_stages(run):
        return describe_store(run)
    if config.lm.model == SCRATCH:
        vocabulary = vocabulary_size(run)
        with torch.device("meta"):
            model = build_model(config.lm.architecture, vocabulary)
        width, field, layers = model.options.width, model.receptive_field, model.options.layers
        parameters, head = (sum(p.numel() for p in part.parameters()) for part in (model, model.head))
    else:
        lm = run.parts.source_lm
        vocabulary, width, field = lm.vocab_size, lm.width, lm.receptive_field
        parameters, layers = lm.parameters, max(1, round(lm.parameters / (14 * lm.width**2)))  # about
        head = vocabulary * width
    count, gnn_width = network_parameters(config, width), config.gnn.width or width
    field = min(config.lm.window, field or config.lm.window)
    return Description(parameters, count, field, width, gnn_width, vocabulary, layers, head)


def network_parameters(config: Config, width: int) -> int:
    """The parameters of the graph network over a base model of this width; it is not allocated for this."""
    import torch

    from gnnlm.gnn.gnn_options import resolve_options
    from gnnlm.gnn.model import GnnModel
    from gnnlm.lm.head import SoftmaxHead

    with torch.device("meta"):
        gnn = GnnModel(resolve_options(config.gnn, width), SoftmaxHead(torch.empty(1, width)))
    return sum(p.numel() for p in gnn.parameters())


def _corpus_is_made(run: Run) -> bool:
    state = run.state(run.stages["corpus"])
    if state in ("stale", "damaged"):
        raise ConfigError(
            f"{run.path('corpus')} is {state}; rebuild it (gnnlm corpus --rebuild), or choose another run directory"
        )
    return state == "done"


def vocabulary_size(run: Run) -> int:
    """The size of a corpus's vocabulary: as built, or as published."""
    from gnnlm.corpus.benchmarks import BENCHMARKS

    corpus = run.config.corpus
    if _corpus_is_made(run):
        return int(run.artifact("corpus").facts["vocabulary"]["size"])
    if corpus.source is None or not corpus.is_benchmark or corpus.train is not None:
        raise ConfigError(
            "the vocabulary is not known before the corpus is built; build it first: gnnlm corpus, with this config"
        )
    return BENCHMARKS[corpus.source].vocabulary


@dataclass(frozen=True)
class Amount:
    """How much text a split has."""

    tokens: int
    documents: int

    @property
    def positions(self) -> int:
        return self.tokens + self.documents

    def scaled(self, tokens: int) -> Amount:
        """So many tokens, in documents of the same length."""
        return Amount(tokens, self.documents * tokens // max(1, self.tokens))


def amounts(run: Run) -> dict[str, Amount]:
    """How much text each split has: as built, as published, or as limited."""
    from gnnlm.corpus.benchmarks import BENCHMARKS

    corpus = run.config.corpus
    if _corpus_is_made(run):
        facts = run.artifact("corpus").facts
        return {split: Amount(int(facts[split]["tokens"]), int(facts[split]["documents"])) for split in SPLITS}
    limits = {split: getattr(corpus, f"max_{split}_tokens") for split in SPLITS}
    if corpus.source is not None and corpus.is_benchmark and corpus.train is None:
        benchmark = BENCHMARKS[corpus.source]
        documents = benchmark.sentences or (0, 0, 0)  # there are too few articles to matter
        return {
            split: Amount(min(tokens, limits[split] or tokens), some)
            for split, tokens, some in zip(SPLITS, benchmark.tokens, documents, strict=True)
        }
    if any(limit is None for limit in limits.values()):
        raise ConfigError(
            "the amount of text is not known before the corpus is built; build it first: gnnlm corpus, with this config"
        )
    return {split: Amount(int(limits[split]), 0) for split in SPLITS}


def done_stages(run: Run) -> dict[str, int]:
    """The stages that are done, with their bytes on disk."""
    return {name: run.bytes_of(name) for name, stage in run.stages.items() if run.state(stage) == "done"}
