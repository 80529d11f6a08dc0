"""Search quality: what the run's index finds of the true neighbours, and what it costs in perplexity."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gnnlm.datastore.store import mapped
from gnnlm.evaluate.analysis.document_sample import Drawn, draw_documents
from gnnlm.evaluate.analysis.figure import axes_of, line_of
from gnnlm.evaluate.analysis.section import Cell, Figure, Section, Table, change_of, number, percent, perplexity, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.predict.predictor import LABELS
from gnnlm.predict.predictor import perplexity as perplexity_of
from gnnlm.predict.split_scoring import score_text
from gnnlm.progress import Track
from gnnlm.retrieval.index import Index, keys_of
from gnnlm.retrieval.index_recall import recall_ks, recall_of
from gnnlm.retrieval.open_index import open_exact
from gnnlm.retrieval.search import search_table

QUERIES = 2000  # test positions whose neighbours are compared, at most
TOKENS = 6000  # test tokens that are scored with exact neighbours, at most
CHUNK = 256


def measure(subject: Subject) -> dict[str, Any]:
    made, k = subject.artifact("index").facts, subject.test.table.k
    kind = made["kind"]
    found: dict[str, Any] = {"kind": kind, "k": k, "rows": made["rows"]}
    if kind == "exact":
        return found | {"queries": 0, "recall": [{"k": at, "recall": 1.0} for at in recall_ks(k)], "cost": []}
    device = str(subject.parts.predictor.head.device)
    exact = open_exact(subject.artifact("encode"), subject.parts.streams["train"], made["metric"], device)
    found |= _recall(subject, exact)
    return found | _cost(subject, exact, draw_documents(subject, TOKENS))


def _recall(subject: Subject, exact: Index) -> dict[str, Any]:
    """Recall of the run's own table on test positions drawn at random."""
    ks, keys_PD = recall_ks(subject.test.table.k), mapped(keys_of(subject.artifact("encode"), "test"))
    positions = subject.positions_N.numpy()
    drawn = np.sort(np.random.default_rng(subject.seed).permutation(positions)[:QUERIES])
    sums = dict.fromkeys(ks, 0.0)
    with Track("exact search of test", len(drawn), "queries") as track:
        for part in torch.from_numpy(drawn).split(CHUNK):
            for k, recall in recall_of(subject.test.table.at(part), keys_PD[part], exact, ks).items():
                sums[k] += recall * len(part)
            track.advance(len(part))
    return {"queries": len(drawn), "recall": [{"k": k, "recall": total / len(drawn)} for k, total in sums.items()]}


def _cost(subject: Subject, exact: Index, drawn: Drawn) -> dict[str, Any]:
    """The predictors with exact neighbours on some documents, and as the run has them."""
    predictor, config, test = subject.parts.predictor, subject.config, subject.test
    keys_PD = mapped(keys_of(subject.artifact("encode"), "test"))[drawn.positions_P]
    began, chunk = time.perf_counter(), config.search.shard_queries
    table = search_table(exact, keys_PD, test.table.k, chunk, "exact search of test documents", drawn.positions_P)
    seconds = time.perf_counter() - began
    names, label = predictor.names, "score test with exact neighbours"
    searched = replace(test, table=table)
    scores, _ = score_text(predictor, searched, config.eval.block, label, names, drawn.positions_P)
    rows = []
    for name in names[1:]:
        own = subject.scores[name][drawn.tokens_N]
        exactly = perplexity_of(-float(scores[name].mean()))
        rows.append({"name": name, "exact_ppl": exactly, **subject.changed(own, scores[name], drawn.tokens_N)})
    speeds = {"exact": len(drawn.positions_P) / seconds, "index": _queries_per_second(subject)}
    tokens = {"tokens": len(drawn.tokens_N), "documents": len(drawn.documents)}
    return {"cost": rows, "queries_per_s": speeds, **tokens}


def _queries_per_second(subject: Subject) -> float:
    return len(subject.test.text) / max(1e-9, subject.report.seconds["search"])


def show(found: dict[str, Any]) -> Section:
    rows: list[list[Cell]] = [[str(row["k"]), row["recall"]] for row in found["recall"]]
    tables = [Table("search_recall", "Recall against exact search", [text("k"), percent("recall@k")], rows)]
    if found["kind"] == "exact":
        said = (
            f"The run's index is exact over {found['rows']:,} rows: recall is 1 by definition, and search costs no "
            "perplexity. Nothing was searched for this."
        )
        return Section("search", "Search quality", [said], tables, (), [said])
    last, speeds = found["recall"][-1], found["queries_per_s"]
    worst = max(found["cost"], key=lambda row: row["change"])
    said = (
        f"The index ({found['kind']}) finds {100 * last['recall']:.1f}% of the {last['k']:,} true neighbours, and "
        f"{100 * found['recall'][0]['recall']:.1f}% of the nearest ones; with exact neighbours perplexity of "
        f"{LABELS[worst['name']]} is {worst['exact_ppl']:.2f}, with those of the index {worst['ppl']:.2f}, "
        f"{change_of(worst)}."
    )
    columns = [text("predictor"), perplexity("exact neighbours"), perplexity("the run's"), text("cost, 95%")]
    cost = [[LABELS[row["name"]], row["exact_ppl"], row["ppl"], change_of(row)] for row in found["cost"]]
    tables.append(Table("search_cost", "Perplexity with exact neighbours and with the run's", columns, cost))
    pace = [["exact", speeds["exact"]], ["the run's index", speeds["index"]]]
    tables.append(Table("search_speed", "Queries a second", [text("search"), number("queries/s", 0)], pace))
    figure, (axes,) = axes_of(1)
    line_of(axes, "knn", [r["k"] for r in found["recall"]], [100 * r["recall"] for r in found["recall"]], "recall@k")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["k"] for row in found["recall"]], [str(row["k"]) for row in found["recall"]])
    axes.set_ylim(0, 103)
    axes.set_xlabel("k")
    axes.set_ylabel("recall (%)")
    return Section(
        "search",
        "Search quality",
        [
            f"Recall@k is the share of the k nearest of {found['rows']:,} rows that are among the first k that the "
            f"index found, on {found['queries']:,} test positions drawn at random; rows exactly as near as the k-th "
            f"count as found. The cost is measured on {found['documents']} whole test documents with "
            f"{found['tokens']:,} tokens: network and mix are the run's, neighbours and their similarities exact.",
            said,
        ],
        tables,
        [Figure("search_recall", "Recall of the index by k", said, figure)],
        [said],
    )
