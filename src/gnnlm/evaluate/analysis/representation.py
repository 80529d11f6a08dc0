"""Representation in kNN: queries and keys from {base, GNN} (paper, Table 5).

The softmax side is the GNN's state throughout; only the neighbours of p_kNN and their similarities change. Each pair
has its own k, T and weights, chosen on valid as the run chooses its own. All search is exact. `gnn_store.py` says how
the GNN's states of train positions are made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from gnnlm.artifact import Artifact, Draft
from gnnlm.datastore.store import mapped
from gnnlm.evaluate.analysis.figure import axes_of
from gnnlm.evaluate.analysis.gnn_store import gnn_keys
from gnnlm.evaluate.analysis.score_cache import ScoredSplit
from gnnlm.evaluate.analysis.section import Cell, Column, Figure, Section, Table, change_of, perplexity, text
from gnnlm.evaluate.analysis.subject import Subject
from gnnlm.evaluate.mix_weight import sample_text
from gnnlm.evaluate.tune import best_with_one_weight, choose_mixes, grid_of, tune_mixes
from gnnlm.predict.bootstrap import Floats
from gnnlm.predict.knn import Mix
from gnnlm.predict.split_scoring import SearchedText, SplitScores
from gnnlm.retrieval.exact import ExactIndex
from gnnlm.retrieval.index import Index, Rows, as_keys, keys_of
from gnnlm.retrieval.open_index import open_exact
from gnnlm.retrieval.search import search_table

PAPER = {"base/base": 14.82, "base/gnn": 15.16, "gnn/base": 14.97, "gnn/gnn": 14.76}  # query/key, WikiText-103
WEIGHED = ("tuned", "one_weight")  # as the run weighs p_kNN, and with one weight as in the paper
LABEL = {"base": "base", "gnn": "GNN"}


def measure(subject: Subject, draft: Draft, valid: ScoredSplit, test: ScoredSplit, store: Artifact) -> dict[str, Any]:
    """Pairs are kept as they are made: their mixes as notes, their log-probabilities as arrays."""
    kept, scored = draft.notes.setdefault("mixes", {}), {"valid": valid, "test": test}
    for key in ("base", "gnn"):
        pairs = [pair for pair in PAPER if pair.endswith(f"/{key}") and pair not in kept]
        index = keys_index(subject, key, store) if pairs else None
        for pair in pairs:
            assert index is not None
            query = pair.split("/")[0]
            texts = {split: searched(subject, query, key, split, scored[split], index) for split in scored}
            mixes = choose(subject, texts["valid"], valid)
            for name, mix in mixes.items():
                values = pair_scores(subject, texts["test"], test, mix)
                draft.save(_file(pair, name), values.astype(np.float32))
            kept[pair] = {name: mix.as_dict() for name, mix in mixes.items()}
            draft.commit(*(_file(pair, name) for name in mixes))
    found: dict[str, Any] = {}
    for pair in PAPER:
        rows = {name: _row(subject, draft, pair, name) | {"mix": kept[pair][name]} for name in WEIGHED}
        found[pair] = rows["tuned"] | {"one_weight": rows["one_weight"]}
    facts = {name: store.facts.get(name) for name in ("kind", "bytes", "error", "rows", "k", "searched_here")}
    about = {"exclude": subject.config.exclude, "key": subject.artifact("encode").facts.get("key", "state")}
    return found | {"store": facts | about, "base": subject.changed(subject.scores["base"], subject.scores["base"])}


def keys_index(subject: Subject, key: str, store: Artifact) -> Index:
    """Exact search over the rows of the run's index, by the base model's keys or by the GNN's states."""
    metric, device = subject.artifact("index").facts["metric"], str(subject.parts.predictor.head.device)
    stream = subject.parts.streams["train"]
    if key == "base":
        return open_exact(subject.artifact("encode"), stream, metric, device)
    positions = Rows.of(stream).all()
    return ExactIndex(as_keys(gnn_keys(store, positions, device).to(device), metric), positions.to(device), metric)


def searched(subject: Subject, query: str, key: str, split: str, scored: ScoredSplit, index: Index) -> SearchedText:
    """A split with the neighbours of one pair; those of base/base are the run's own if its index is exact."""
    own = subject.parts.searched(split)
    if query == key == "base" and subject.artifact("index").facts["kind"] == "exact":
        return own
    keys_PD = queries_of(subject, query, split, scored)
    label, chunk = f"search {split} by {query} queries and {key} keys", subject.config.search.shard_queries
    return replace(own, table=search_table(index, keys_PD, own.table.k, chunk, label))


def queries_of(subject: Subject, query: str, split: str, scored: ScoredSplit) -> Tensor:
    """The queries of all positions of a split, [P, D]."""
    return scored.gnn_states_PD if query == "gnn" else mapped(keys_of(subject.artifact("encode"), split))


def choose(subject: Subject, valid: SearchedText, scored: ScoredSplit) -> dict[str, Mix]:
    """The mix of the GNN's softmax with these neighbours, chosen on valid as the tune stage does."""
    config, store, scores = subject.config, subject.parts.store, {"gnn": scored.log_probs("gnn")}
    grid = grid_of(config.tune, config.buckets, config.index.metric, valid.table.similarity)
    tuned = tune_mixes(valid, store, scores, grid)
    mix = tuned[0]["gnn"]
    if config.gate:
        choice = choose_mixes(valid, store, SplitScores(scores, {}, {"gnn": scored.sure("gnn")}), tuned)["gnn"]
        mix = choice.mixes[choice.best]
    return {"tuned": mix, "one_weight": best_with_one_weight(tuned[1], "gnn")}


def pair_scores(subject: Subject, test: SearchedText, scored: ScoredSplit, mix: Mix) -> Floats:
    """Log-probabilities of the test tokens under a mix of the GNN's softmax with these neighbours."""
    sure = None if mix.gate is None else scored.sure("gnn")
    sample = sample_text(test, subject.parts.store, scored.log_probs("gnn"), mix, sure)
    return np.asarray(sample.log_probs(mix).numpy())


def _file(pair: str, name: str) -> str:
    return f"{pair.replace('/', '-')}.{name}.log_probs.npy"


def _row(subject: Subject, draft: Draft, pair: str, name: str) -> dict[str, Any]:
    """Perplexity of a pair and its paired change against base/base."""
    scores, first = (np.load(draft.folder / _file(each, name)).astype(np.float64) for each in (pair, "base/base"))
    return subject.changed(scores, first)


def show(found: dict[str, Any]) -> Section:
    store, pairs = found["store"], {pair: found[pair] for pair in PAPER}
    alike = all(row["ppl"] == row["one_weight"]["ppl"] for row in pairs.values())
    columns = [text("query"), text("key"), perplexity("+GNN+kNN"), text("change, 95%")]
    if not alike:
        columns += [perplexity("with one weight"), text("one weight: change, 95%")]
    columns += [perplexity("paper"), _signed("paper: change")]
    rows: list[list[Cell]] = []
    for pair, row in pairs.items():
        one, (query, key) = row["one_weight"], pair.split("/")
        first = pair == "base/base"
        rows.append([LABEL[query], LABEL[key], row["ppl"], "" if first else change_of(row)])
        if not alike:
            rows[-1] += [one["ppl"], "" if first else change_of(one)]
        rows[-1] += [PAPER[pair], PAPER[pair] / PAPER["base/base"] - 1]
    said = _finding(pairs)
    return Section(
        "representation",
        "Representation in kNN",
        [
            "Neighbours for p_kNN are found with queries and keys that are states of the base model or of the graph "
            "network, by exact search. The softmax side is the network's state in all four rows, and each row has its "
            "own k, temperature and weights, chosen on valid as the run chooses its own. Changes are against base "
            "queries and base keys, with the 95% interval of the paired change.",
            _how(store),
            said,
            "The paper's figures are for WikiText-103. It finds GNN states for both best by a little, and one of each "
            "worst.",
        ],
        [Table("representation", "Test perplexity by representation", columns, rows)],
        [_figure(pairs, said)],
        [said],
    )


def _signed(name: str) -> Column:
    return Column(name, lambda value: f"{100 * value:+.1f}%")


def _how(store: dict[str, Any]) -> str:
    """How the GNN's states of train positions were made."""
    barred = "its own document" if store["exclude"] == "document" else "its receptive field and what is carried to it"
    how = (
        f"The network's state of a train position has {store['k']} neighbours found under the run's leakage rule: none "
        f"from {barred}. So a key has seen neither itself nor its own token, as a query of held-out text has not."
    )
    if store["searched_here"]:
        how += (
            f" Of {store['rows']:,} train positions, {store['searched_here']:,} were not in the run's table under that "
            "rule; they were searched for this, in the same index."
        )
    if store["kind"] == "pq":
        how += (
            f" As the run's codec says, the network's states are stored in {store['bytes']} bytes each, which loses "
            f"{100 * store['error']:.1f}% of their variance; base keys are exact, as in the run's own search."
        )
    if store["key"] != "state":
        how += (
            " Base queries and keys are the input of the last feed-forward layer (store.key), as in the run's search."
        )
    return how


def _finding(pairs: dict[str, dict[str, Any]]) -> str:
    first = pairs["base/base"]
    best = min(pairs, key=lambda pair: pairs[pair]["ppl"])
    if all(row["ppl"] == first["ppl"] for row in pairs.values()):
        return f"All four are equal ({first['ppl']:.2f}): the network leaves the base model's states as they are."
    row, (query, key) = pairs[best], best.split("/")
    if best == "base/base":
        second = min((pair for pair in pairs if pair != best), key=lambda pair: pairs[pair]["ppl"])
        worse = pairs[second]["change_low"] is not None and pairs[second]["change_low"] > 0
        return (
            f"Base states for queries and keys are best ({first['ppl']:.2f}); {LABEL[second.split('/')[0]]} queries "
            f"with {LABEL[second.split('/')[1]]} keys come next: {pairs[second]['ppl']:.2f}, "
            f"{change_of(pairs[second])}{'' if worse else ', a difference that is not significant'}."
        )
    sure = row["change_high"] is not None and row["change_high"] < 0
    return (
        f"{'GNN' if query == 'gnn' else 'Base'} queries with {LABEL[key]} keys are best: {row['ppl']:.2f} against "
        f"{first['ppl']:.2f} of base states for both, {change_of(row)}"
        f"{'' if sure else ', a difference that is not significant'}."
    )


def _figure(pairs: dict[str, dict[str, Any]], said: str) -> Figure:
    figure, (axes,) = axes_of(1, height=2.4)
    for place, (pair, row) in enumerate(pairs.items()):
        low, high = (100 * (row["change"] if row[end] is None else row[end]) for end in ("change_low", "change_high"))
        axes.plot([low, high], [place, place], color="#009e73", lw=2.5, solid_capstyle="butt")
        axes.plot([low, high], [place, place], "|", color="#009e73", ms=10, mew=2)
        axes.plot(
            100 * row["change"], place, "^", color="#009e73", ms=8, mec="white", label="here" if not place else ""
        )
        paper = 100 * (PAPER[pair] / PAPER["base/base"] - 1)
        axes.plot(paper, place, "x", color="#333333", ms=7, label="paper" if not place else "")
    axes.axvline(0, color="#666666", ls="--", lw=1)
    axes.set_yticks(range(len(pairs)), [" / ".join(LABEL[part] for part in pair.split("/")) for pair in pairs])
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set_xlabel("change of perplexity against base / base in %, with 95% interval")
    axes.set_ylabel("query / key")
    axes.legend(frameon=False, fontsize=9)
    return Figure("representation", "Perplexity by representation of queries and keys", said, figure)
