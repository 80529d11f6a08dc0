"""Drift: how far the store has moved away from what was fitted to it, measured on valid.

What was trained stays as it is when documents come and go. Whether that still does is measured, not guessed from the
number of changes: the recall of the index against exact search of the rows that are served; the validation loss with
the mix as it is and with one that is fitted to the same scores; the gain of the graph network over the base model.
Documents that share text with valid or test are left out. Drift is advice: a run that has drifted can be trusted.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnlm.evaluate.tune import grid_of, losses_of, tune
from gnnlm.predict.knn import Mix
from gnnlm.predict.predictor import LABELS, MIXED, Predictor, perplexity
from gnnlm.predict.split_scoring import SearchedText, SplitScores, score_surely
from gnnlm.retrieval.index import keys_of, live_rows
from gnnlm.retrieval.index_recall import checked_keys, checked_recall
from gnnlm.retrieval.search import search_table
from gnnlm.run.snapshot import Snapshot

AT = "128"  # the number of neighbours whose recall decides
LOST_RECALL = 0.05  # the queries are those of the building, 64: another draw of them moves recall by about 0.02
LOST_BY_MIX = 0.01  # nats, one percent of perplexity; a fit to valid flatters itself there by about a tenth of that
LOST_BY_GNN = 0.02  # nats; more than for the mix, which is fitted in minutes, where a network trains for hours


@dataclass(frozen=True)
class Drift:
    """The drift of a part, in figures and in words, and whether to fit the part again."""

    part: str
    refit: bool
    words: str
    figures: dict[str, Any]

    def line(self, root: Path) -> str:
        again = f"fit it again: gnnlm refit {shlex.quote(str(root))} --part {self.part}"
        return f"drift of the {self.part}: {self.words}; {again if self.refit else 'no refit is needed'}"

    def as_dict(self) -> dict[str, Any]:
        return {"refit": self.refit, **self.figures}


class Measuring:
    """A generation that is measured on valid."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._whole = snapshot
        self._measured = snapshot.without_overlap()
        self._config = snapshot.config

    def all(self) -> Iterator[Drift]:
        """Yield the drift of every part that can be fitted again."""
        if self._measured.artifact("index").facts["kind"] != "exact":
            yield self.index()
        yield self.mix()
        if self._measured.gnn is not None and not self._measured.has_unread:
            yield self.gnn()

    def index(self) -> Drift:
        """Measure recall against exact search of the served rows, with the queries of the build."""
        served = self._whole
        encoded, made = served.artifact("encode"), served.artifact("index")
        keys_ND, rows = checked_keys(encoded, self._config.seed), live_rows(served.streams["train"], served.live)
        then, now = made.facts["recall"], checked_recall(served.segment_indexes, encoded, rows, keys_ND)
        words = f"it finds {now[AT]:.1%} of the {AT} nearest rows, and found {then[AT]:.1%} when it was trained"
        return Drift("index", then[AT] - now[AT] > LOST_RECALL, words, {"then": then, "now": now})

    @cached_property
    def _valid(self) -> SearchedText:
        """Valid, with its neighbours in the store as it is served."""
        parts, config = self._measured, self._config
        keys_ND = torch.from_numpy(np.array(keys_of(parts.artifact("encode"), "valid")))
        table = search_table(parts.index, keys_ND, config.search.k, config.search.shard_queries, "doctor: search valid")
        return SearchedText(parts.encoded["valid"], table, config.lm.continuous)

    @cached_property
    def _mixes(self) -> dict[str, Mix]:
        return {name: Mix.of(values) for name, values in self._measured.artifact("tune").facts["mix"].items()}

    @cached_property
    def _scored(self) -> SplitScores:
        """Valid as base and GNN score it, and how sure they are, if a gate asks for that."""
        wanted = ("base",) if self._measured.gnn is None else ("base", "gnn")
        gated = self._config.gate or any(mix.gate is not None for mix in self._mixes.values())
        predictor, block = self._measured.predictor_with({}), self._config.eval.block
        return score_surely(predictor, self._valid, block, "doctor: score valid", wanted, wanted if gated else ())

    def mix(self) -> Drift:
        """Compare the loss with the current kNN weights to the loss with weights fitted to the same scores."""
        config, store = self._config, self._measured.store
        grid = grid_of(config.tune, config.buckets, config.index.metric, self._valid.table.similarity)
        anew = tune(self._valid, store, self._scored, grid, config.gate).mixes
        now, best = (losses_of(self._valid, store, self._scored, mixes) for mixes in (self._mixes, anew))
        then: dict[str, float] = self._measured.artifact("tune").facts.get("valid_loss", {})  # of an older run unknown
        names = [name for name in MIXED if name in now]
        words = []
        for name in names:
            was = f", {perplexity(then[name]):.3f} when it was fitted" if name in then else ""
            words.append(
                f"perplexity of {LABELS[name]} on valid is {perplexity(now[name]):.3f} with it, "
                f"{perplexity(best[name]):.3f} with one fitted anew{was}"
            )
        losses = {"then": then, "now": now, "anew": best}
        figures = {what: {name: found[name] for name in names if name in found} for what, found in losses.items()}
        refit = any(now[name] - best[name] > LOST_BY_MIX for name in names)
        return Drift("mix", refit, ", and ".join(words), figures)

    def gnn(self) -> Drift:
        """Compare the gain of +GNN over base on the validation tokens of its training, then and now."""
        parts, config = self._measured, self._config.train
        made, positions = parts.artifact("train"), torch.arange(min(config.valid_tokens, len(self._valid.text)))
        predictor = Predictor(parts.head, parts.graphs, parts.gnn, config.curriculum[-1].k, {}, parts.cache)
        asked = (predictor, self._valid, self._config.eval.block, "doctor: score valid", ("base", "gnn"), ())
        found = score_surely(*asked, positions).log_probs
        now = float((found["gnn"] - found["base"]).mean())
        history = json.loads(made.text("history.json"))
        best = next(entry for entry in history if entry["step"] == made.facts["best_step"])
        then, unseen = best["valid_base"] - best["valid_gnn"], self._unseen()
        words = (
            f"+GNN changes perplexity on valid by {perplexity(-now) - 1:+.1%}, and did by {perplexity(-then) - 1:+.1%} "
            f"when it was trained; it has never seen {unseen:.0%} of the rows"
        )
        figures = {"then": then, "now": now, "unseen": unseen}
        return Drift("gnn", then - now > LOST_BY_GNN, words, figures)

    def _unseen(self) -> float:
        """Return the share of rows that were added after the graph network was trained."""
        new, texts = 0, self._whole.streams["train"].segments
        for segment, text in zip(self._whole.generation.segments, texts, strict=True):
            numbers = set(segment.unseen) - set(segment.removed)
            new += sum(int(text.starts[number + 1] - text.starts[number]) - 1 for number in numbers)
        return new / max(1, self._whole.generation.rows)
