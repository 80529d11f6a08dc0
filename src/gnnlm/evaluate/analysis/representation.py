"""Representation in kNN: queries and keys from {base, GNN} (paper, Table 5).

The softmax side is the GNN's state throughout; only the neighbours of p_kNN and their similarities change. Each pair
has its own k, T and weights, chosen on valid as the run chooses its own. All search is exact. `gnn_store.py` says how
the GNN's states of train positions are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import ConfigDict
from torch import Tensor

from gnnlm.artifact import Artifact, Draft
from gnnlm.evaluate.analysis.figure import axes_of, changes_of, legend_of
from gnnlm.evaluate.analysis.gnn_store import gnn_keys
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.score_cache import CachedScores
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.table import Table, percent, perplexity, text
from gnnlm.evaluate.tune import choose_mixes, grid_of, tune_mixes
from gnnlm.predict.knn import Mix
from gnnlm.predict.split_scoring import SearchedText, SplitScores
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.index import Index, Rows, as_keys
from gnnlm.retrieval.search import search_table

FIRST = "base/base"
PAPER = {FIRST: 14.82, "base/gnn": 15.16, "gnn/base": 14.97, "gnn/gnn": 14.76}  # query/key, WikiText-103
WEIGHTS = ("tuned", "one_weight")  # p_kNN weighed as in the run, and with one weight as in the paper
LABEL = {"base": "base", "gnn": "GNN"}


class StoreOfStates(PartResult):
    """How the GNN's states of train positions were made and stored."""

    kind: str
    bytes: int | None = None
    error: float | None = None
    rows: int
    k: int
    searched_here: int
    exclude: str
    key: str


class WeightedPair(PerplexityChange):
    """The figures of a pair against base/base, and its mix."""

    mix: dict[str, Any]


class RepresentationPair(WeightedPair):
    one_weight: WeightedPair


class RepresentationResult(PartResult):
    """The pairs, by query/key."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, RepresentationPair]

    store: StoreOfStates
    base: PerplexityChange

    @property
    def pairs(self) -> dict[str, RepresentationPair]:
        return {pair: self.__pydantic_extra__[pair] for pair in PAPER}


def measure(
    subject: Subject, draft: Draft, valid: CachedScores, test: CachedScores, store: Artifact
) -> RepresentationResult:
    """Measure each pair. Finished pairs are kept in the draft: their mixes as notes, their scores as arrays."""
    mixes = draft.notes.setdefault("mixes", {})
    scores = {"valid": valid, "test": test}
    for key in ("base", "gnn"):
        pairs = [pair for pair in PAPER if pair.endswith(f"/{key}") and pair not in mixes]
        index = keys_index(subject, key, store) if pairs else None
        for pair in pairs:
            assert index is not None
            query = pair.split("/")[0]
            texts = {split: searched(subject, query, key, split, scores[split], index) for split in scores}
            chosen = choose(subject, texts["valid"], valid)
            for name, mix in chosen.items():
                mixed = test.mixed(texts["test"], subject.snapshot.store, "gnn", mix)
                draft.save(_file(pair, name), mixed.astype(np.float32))
            mixes[pair] = {name: mix.as_dict() for name, mix in chosen.items()}
            draft.commit(*(_file(pair, name) for name in chosen))

    def figures(pair: str, name: str) -> dict[str, Any]:
        here, first = (np.load(draft.folder / _file(each, name)).astype(np.float64) for each in (pair, FIRST))
        return {**subject.changed(here, first).model_dump(), "mix": mixes[pair][name]}

    found = {
        pair: RepresentationPair(**figures(pair, "tuned"), one_weight=WeightedPair(**figures(pair, "one_weight")))
        for pair in PAPER
    }
    facts = {name: store.facts.get(name) for name in ("kind", "bytes", "error", "rows", "k", "searched_here")}
    key = subject.artifact("encode").facts.get("key", "state")
    about = StoreOfStates(**facts, exclude=subject.config.exclude, key=key)
    base = subject.scores["base"]
    return RepresentationResult(store=about, base=subject.changed(base, base), **found)


def keys_index(subject: Subject, key: str, store: Artifact) -> Index:
    """Exact search over the rows of the run's index, by the base model's keys or by the GNN's states."""
    if key == "base":
        return subject.exact_index()
    metric = subject.artifact("index").facts["metric"]
    positions = Rows.of(subject.snapshot.streams["train"]).all()
    keys = gnn_keys(store, positions, subject.device).to(subject.device)
    return ExactIndex(as_keys(keys, metric), positions.to(subject.device), metric)


def searched(subject: Subject, query: str, key: str, split: str, scores: CachedScores, index: Index) -> SearchedText:
    """A split with the neighbours of one pair; those of base/base are the run's own if its index is exact."""
    own = subject.snapshot.searched(split)
    if query == key == "base" and subject.artifact("index").facts["kind"] == "exact":
        return own
    keys_PD = queries_of(subject, query, split, scores)
    label = f"search {split} by {query} queries and {key} keys"
    return replace(own, table=search_table(index, keys_PD, own.table.k, subject.config.search.shard_queries, label))


def queries_of(subject: Subject, query: str, split: str, scores: CachedScores) -> Tensor:
    """The queries of all positions of a split, [P, D]."""
    return scores.gnn_states_PD if query == "gnn" else subject.keys(split)


def choose(subject: Subject, valid: SearchedText, scores: CachedScores) -> dict[str, Mix]:
    """The mix of the GNN's softmax with these neighbours, chosen on valid as the tune stage does."""
    config, store = subject.config, subject.snapshot.store
    log_probs = {"gnn": scores.log_probs("gnn")}
    grid = grid_of(config.tune, config.buckets, config.index.metric, valid.table.similarity)
    tuned = tune_mixes(valid, store, log_probs, grid)
    mix = tuned[0]["gnn"]
    if config.gate:
        fitted = choose_mixes(valid, store, SplitScores(log_probs, {}, {"gnn": scores.confidence("gnn")}), tuned)["gnn"]
        mix = fitted.mixes[fitted.best]
    return {"tuned": mix, "one_weight": tuned[1].best("gnn")}


def _file(pair: str, name: str) -> str:
    return f"{pair.replace('/', '-')}.{name}.log_probs.npy"


def show(result: RepresentationResult) -> AnalysisSection:
    pairs = result.pairs
    columns = [
        text("query", lambda line: LABEL[line[0].split("/")[0]]),
        text("key", lambda line: LABEL[line[0].split("/")[1]]),
        perplexity("+GNN+kNN", lambda line: line[1].ppl),
        text("change, 95%", lambda line: "" if line[0] == FIRST else line[1].words),
    ]
    if any(pair.ppl != pair.one_weight.ppl for pair in pairs.values()):
        columns += [
            perplexity("with one weight", lambda line: line[1].one_weight.ppl),
            text("one weight: change, 95%", lambda line: "" if line[0] == FIRST else line[1].one_weight.words),
        ]
    columns += [
        perplexity("paper", lambda line: PAPER[line[0]]),
        percent("paper: change", lambda line: PAPER[line[0]] / PAPER[FIRST] - 1, sign=True),
    ]
    finding = _finding(pairs)
    return AnalysisSection(
        [
            "Neighbours for p_kNN are found with queries and keys that are states of the base model or of the graph "
            "network, by exact search. The softmax side is the network's state in all four rows, and each row has its "
            "own k, temperature and weights, chosen on valid as the run chooses its own. Changes are against base "
            "queries and base keys, with the 95% interval of the paired change.",
            _how(result.store),
            finding,
            "The paper's figures are for WikiText-103. It finds GNN states for both best by a little, and one of each "
            "worst.",
        ],
        [Table.of("representation", "Test perplexity by representation", pairs.items(), *columns)],
        [_figure(pairs, finding)],
        [finding],
    )


def _how(store: StoreOfStates) -> str:
    """How the GNN's states of train positions were made."""
    barred = "its own document" if store.exclude == "document" else "its receptive field and what is carried to it"
    how = (
        f"The network's state of a train position has {store.k} neighbours found under the run's leakage rule: none "
        f"from {barred}. So a key has seen neither itself nor its own token, as a query of held-out text has not."
    )
    if store.searched_here:
        how += (
            f" Of {store.rows:,} train positions, {store.searched_here:,} were not in the run's table under that "
            "rule; they were searched for this, in the same index."
        )
    if store.kind == "pq":
        how += (
            f" As the run's codec says, the network's states are stored in {store.bytes} bytes each, which loses "
            f"{100 * (store.error or 0.0):.1f}% of their variance; base keys are exact, as in the run's own search."
        )
    if store.key != "state":
        how += (
            " Base queries and keys are the input of the last feed-forward layer (store.key), as in the run's search."
        )
    return how


def _finding(pairs: Mapping[str, RepresentationPair]) -> str:
    first = pairs[FIRST]
    if all(pair.ppl == first.ppl for pair in pairs.values()):
        return f"All four are equal ({first.ppl:.2f}): the network leaves the base model's states as they are."
    best, second = sorted(pairs, key=lambda pair: pairs[pair].ppl)[:2]
    if best == FIRST:
        query, key = second.split("/")
        row = pairs[second]
        said = (
            f"Base states for queries and keys are best ({first.ppl:.2f}); {LABEL[query]} queries with {LABEL[key]} "
            f"keys come next: {row.ppl:.2f}, {row.words}"
        )
    else:
        query, key = best.split("/")
        row = pairs[best]
        said = (
            f"{'GNN' if query == 'gnn' else 'Base'} queries with {LABEL[key]} keys are best: {row.ppl:.2f} against "
            f"{first.ppl:.2f} of base states for both, {row.words}"
        )
    return f"{said}{'' if row.is_significant else ', a difference that is not significant'}."


def _figure(pairs: Mapping[str, RepresentationPair], finding: str) -> Figure:
    figure, (axes,) = axes_of(height=2.4)
    names = [" / ".join(LABEL[part] for part in pair.split("/")) for pair in pairs]
    changes_of(axes, names, {"gnn_knn": list(pairs.values())}, against="base / base", labels={"gnn_knn": "here"})
    paper = [100 * (PAPER[pair] / PAPER[FIRST] - 1) for pair in pairs]
    axes.plot(paper, range(len(pairs)), "x", color="#333333", ms=7, label="paper")
    axes.set_ylabel("query / key")
    legend_of(axes, 8, beside=True)
    return Figure("representation", "Perplexity by representation of queries and keys", finding, figure)


PART = AnalysisPart(
    "representation",
    "Representation in kNN",
    RepresentationResult,
    lambda m: measure(m.subject, m.draft, m.scores("valid"), m.scores("test"), m.prepared["gnn-store"]),
    show,
    lambda subject: 4 * sum(subject.seconds_to_search(split) for split in ("valid", "test")),
    stages=("tune", "eval"),
    after=("scored-valid", "scored-test", "gnn-store"),
    gnn=True,
)
