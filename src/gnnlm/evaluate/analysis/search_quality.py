"""Search quality: what the run's index finds of the true neighbours, and what it costs in perplexity."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from pydantic import Field

from gnnlm.evaluate.analysis.figure import axes_of, k_axis, line_of
from gnnlm.evaluate.analysis.part import AnalysisPart
from gnnlm.evaluate.analysis.section import AnalysisSection, Figure, PartResult
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.table import Table, change_columns, number, percent, perplexity, text
from gnnlm.predict.predictor import LABELS
from gnnlm.predict.predictor import perplexity as perplexity_of
from gnnlm.predict.split_scoring import score_text
from gnnlm.progress import Track
from gnnlm.retrieval.index import Index
from gnnlm.retrieval.index_recall import recall_ks, recall_of
from gnnlm.retrieval.search import search_table

QUERIES = 2000  # test positions whose neighbours are compared, at most
TOKENS = 6000  # test tokens that are scored with exact neighbours, at most
CHUNK = 256


class IndexRecall(PartResult):
    k: int
    recall: float


class SearchCost(PerplexityChange):
    """A predictor's perplexity with the run's neighbours, and its change against that with exact neighbours."""

    name: str
    exact_ppl: float


class SearchQualityResult(PartResult):
    """The index of a run; with exact search there is nothing to measure beyond its size."""

    kind: str
    k: int
    rows: int
    queries: int = 0
    recall: list[IndexRecall]
    cost: list[SearchCost] = Field(default_factory=list)
    queries_per_s: dict[str, float] = Field(default_factory=dict)  # `exact` and `index`
    tokens: int = 0
    documents: int = 0


def measure(subject: Subject) -> SearchQualityResult:
    index = subject.artifact("index").facts
    k = subject.test.table.k
    about = {"kind": index["kind"], "k": k, "rows": index["rows"]}
    if index["kind"] == "exact":
        return SearchQualityResult(**about, recall=[IndexRecall(k=at, recall=1.0) for at in recall_ks(k)])
    exact = subject.exact_index()
    drawn = np.sort(np.random.default_rng(subject.seed).permutation(subject.positions_N.numpy())[:QUERIES])
    recall = _recall(subject, exact, torch.from_numpy(drawn))
    predictor, config = subject.snapshot.predictor, subject.config
    sample = subject.sample_documents(TOKENS)
    keys_PD = subject.keys("test")[sample.positions_P]
    chunk = config.search.shard_queries
    began = time.perf_counter()
    table = search_table(exact, keys_PD, k, chunk, "exact search of test documents", sample.positions_P)
    seconds = time.perf_counter() - began
    text_ = replace(subject.test, table=table)
    label = "score test with exact neighbours"
    scores, _ = score_text(predictor, text_, config.eval.block, label, predictor.names, sample.positions_P)
    cost = []
    for name in predictor.names[1:]:
        change = subject.changed(subject.scores[name][sample.tokens_N], scores[name], sample.tokens_N)
        cost.append(SearchCost(**change.model_dump(), name=name, exact_ppl=perplexity_of(-float(scores[name].mean()))))
    return SearchQualityResult(
        **about,
        queries=len(drawn),
        recall=recall,
        cost=cost,
        queries_per_s={
            "exact": len(sample.positions_P) / seconds,
            "index": len(subject.test.text) / max(1e-9, subject.report.seconds["search"]),
        },
        tokens=len(sample.tokens_N),
        documents=len(sample.documents),
    )


def _recall(subject: Subject, exact: Index, positions_N: torch.Tensor) -> list[IndexRecall]:
    """Recall of the run's own table at some test positions."""
    ks = recall_ks(subject.test.table.k)
    keys_PD = subject.keys("test")
    sums = dict.fromkeys(ks, 0.0)
    with Track("exact search of test", len(positions_N), "queries") as track:
        for part in positions_N.split(CHUNK):
            for k, recall in recall_of(subject.test.table.at(part), keys_PD[part], exact, ks).items():
                sums[k] += recall * len(part)
            track.advance(len(part))
    return [IndexRecall(k=k, recall=total / len(positions_N)) for k, total in sums.items()]


def show(result: SearchQualityResult) -> AnalysisSection:
    recall_table = Table.of(
        "search_recall",
        "Recall against exact search",
        result.recall,
        text("k", lambda row: str(row.k)),
        percent("recall@k", lambda row: row.recall),
    )
    if result.kind == "exact":
        finding = (
            f"The run's index is exact over {result.rows:,} rows: recall is 1 by definition, and search costs no "
            "perplexity. Nothing was searched for this."
        )
        return AnalysisSection([finding], [recall_table], summary=[finding])
    nearest, last = result.recall[0], result.recall[-1]
    worst = max(result.cost, key=lambda row: row.change)
    finding = (
        f"The index ({result.kind}) finds {100 * last.recall:.1f}% of the {last.k:,} true neighbours, and "
        f"{100 * nearest.recall:.1f}% of the nearest ones; with exact neighbours perplexity of "
        f"{LABELS[worst.name]} is {worst.exact_ppl:.2f}, with those of the index {worst.ppl:.2f}, {worst.words}."
    )
    cost_table = Table.of(
        "search_cost",
        "Perplexity with exact neighbours and with the run's",
        result.cost,
        text("predictor", lambda row: LABELS[row.name]),
        perplexity("exact neighbours", lambda row: row.exact_ppl),
        *change_columns("the run's", lambda row: row, "cost, 95%"),
    )
    speed_table = Table.of(
        "search_speed",
        "Queries a second",
        [("exact", result.queries_per_s["exact"]), ("the run's index", result.queries_per_s["index"])],
        text("search", lambda row: row[0]),
        number("queries/s", lambda row: row[1], 0),
    )
    figure, (axes,) = axes_of()
    ks = [row.k for row in result.recall]
    line_of(axes, "knn", ks, [100 * row.recall for row in result.recall], "recall@k")
    k_axis(axes, ks, "k")
    axes.set_ylim(0, 103)
    axes.set_ylabel("recall (%)")
    return AnalysisSection(
        [
            f"Recall@k is the share of the k nearest of {result.rows:,} rows that are among the first k that the "
            f"index found, on {result.queries:,} test positions drawn at random; rows exactly as near as the k-th "
            f"count as found. The cost is measured on {result.documents} whole test documents with "
            f"{result.tokens:,} tokens: network and mix are the run's, neighbours and their similarities exact.",
            finding,
        ],
        [recall_table, cost_table, speed_table],
        [Figure("search_recall", "Recall of the index by k", finding, figure)],
        [finding],
    )


PART = AnalysisPart(
    "search",
    "Search quality",
    SearchQualityResult,
    lambda m: measure(m.subject),
    show,
    lambda subject: 2 * subject.seconds_of_sample(TOKENS),
    stages=("tune", "eval"),
)
