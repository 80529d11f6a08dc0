"""The report's rows with passages: every predictor on the states of the base model that reads passages first.

These states are searched and scored like any others, with the kNN mixes of the other rows. Their perplexity with mixes
chosen again, on the part of valid that was read with passages, is noted beside them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact
from gnnlm.config import EvalConfig, TuneConfig
from gnnlm.corpus.stream import Stream
from gnnlm.datastore.store import Segment, Store, mapped
from gnnlm.evaluate.report import PassageComparison, PassageRow, PassageTrial, ReportScores, finite
from gnnlm.evaluate.speeds import seconds_each, speeds
from gnnlm.evaluate.tune import grid_of, tune_mixes
from gnnlm.predict.bootstrap import Floats, bootstrap_interval, change_interval
from gnnlm.predict.predictor import MIXED, Predictor, perplexity
from gnnlm.predict.split_scoring import SearchedText, score_text
from gnnlm.retrieval.index import Index
from gnnlm.retrieval.neighbours import NeighbourTable
from gnnlm.retrieval.search import search_table

LATER = 64  # tokens at the beginning of a document, where there is little text to predict from


def row_name(predictor: str) -> str:
    """The name of a predictor's row with passages.

    >>> row_name("base"), row_name("knn")
    ('passages', 'passages_knn')
    """
    return "passages" if predictor == "base" else f"passages_{predictor}"


@dataclass(frozen=True)
class PassageInputs:
    """The artifact of the passages stage, and what searching it and choosing the mixes again need.

    `k` is the number of neighbours of each position, `chunk` the number of positions searched at once.
    """

    artifact: Artifact
    streams: dict[str, Stream]
    index: Index
    k: int
    chunk: int
    tune: TuneConfig
    buckets: int

    def searched(self, split: str) -> tuple[SearchedText, float]:
        """The part of a split that was read with passages, its neighbours, and the seconds that the search took."""
        name = self.artifact.facts["valid"] if split == "valid" else split
        states = mapped(self.artifact.array(f"{name}.states.npy"))
        keyed = f"{name}.keys.npy" in self.artifact.manifest.files
        keys = mapped(self.artifact.array(f"{name}.keys.npy")) if keyed else states
        table, seconds = self._search(keys, split)
        stream, count = self.streams[split], len(states)
        starts = torch.from_numpy(np.append(stream.starts[stream.starts < count], count))
        text = Store([Segment(states, mapped(stream.tokens)[:count], starts, stream)])
        return SearchedText(text, table), seconds

    def _search(self, keys_PD: Tensor, split: str) -> tuple[NeighbourTable, float]:
        began = time.perf_counter()
        table = search_table(self.index, keys_PD, self.k, self.chunk, f"search {split} read with passages")
        return table, time.perf_counter() - began


def compare_passages(
    given: PassageInputs, predictor: Predictor, test: ReportScores, config: EvalConfig, seed: int
) -> tuple[PassageComparison, dict[str, Floats]]:
    """The report's rows and those with passages on the same tokens, and the log-probabilities of the latter."""
    facts, names, block = given.artifact.facts, predictor.names, config.block
    valid, _ = given.searched("valid")
    wanted = [name for name in names if name not in MIXED]
    unmixed, _ = score_text(predictor, valid, block, "score valid read with passages", wanted)
    grid = grid_of(given.tune, given.buckets, given.index.metric, valid.table.similarity)
    mixes, _ = tune_mixes(valid, predictor.graphs.store, unmixed, grid)
    text, searching = given.searched("test")
    found, seconds = score_text(predictor, text, block, "score test read with passages", names)
    tuned, mixed = replace(predictor, mixes=mixes), [name for name in names if name in MIXED]
    again, _ = score_text(tuned, text, block, "score test read with passages, mixes chosen again", mixed)
    tokens = len(found["base"])
    seconds = {**seconds_each(seconds, names), "encode": facts["seconds"], "search": searching}
    all_speeds = {**test.speeds, **{row_name(n): speed for n, speed in speeds(names, seconds, tokens).items()}}
    passage_scores = {row_name(name): found[name] for name in names}
    scores = {**{name: values[:tokens] for name, values in test.scores.items()}, **passage_scores}
    document = test.document[:tokens]
    later = offsets_in(document) >= LATER
    rows = {}
    for name, values in scores.items():
        low, high = bootstrap_interval(values, document, config.bootstrap, seed)
        change = change_interval(values - scores["base"], document, config.bootstrap, seed) or (None, None)
        rows[name] = PassageRow(
            ppl=finite(_ppl(values)),
            ppl_95=(finite(low), finite(high)),
            change=_change(values, scores["base"]),
            change_low=None if change[0] is None else finite(change[0]),
            change_high=None if change[1] is None else finite(change[1]),
            ppl_later=finite(_ppl(values[later])) if later.any() else None,
            change_later=_change(values[later], scores["base"][later]) if later.any() else None,
            tokens_per_second=all_speeds[name],
        )
    for name, values in again.items():
        rows[row_name(name)] = rows[row_name(name)].model_copy(update={"ppl_own_mix": finite(_ppl(values))})
    tried = [
        PassageTrial(**{key: value for key, value in one.items() if key != "loss"}, ppl=finite(perplexity(one["loss"])))
        for one in facts["tried"]
    ]
    comparison = PassageComparison(
        tokens=tokens,
        documents=len(np.unique(document)),
        later=LATER,
        later_tokens=int(later.sum()),
        **{key: facts[key] for key in ("count", "length", "query", "stride", "tokens_read", "passages")},
        valid_tokens=len(unmixed["base"]),
        valid_base_ppl=finite(perplexity(facts["base_loss"])),
        tried=tried,
        mix={name: mix.as_dict() for name, mix in mixes.items()},
        rows=rows,
    )
    return comparison, passage_scores


def offsets_in(document: np.ndarray) -> np.ndarray:
    """The offset of each token in its document.

    >>> offsets_in(np.array([0, 0, 0, 2, 2])).tolist()
    [0, 1, 2, 0, 1]
    """
    return np.arange(len(document)) - np.searchsorted(document, document)


def _ppl(scores: Floats) -> float:
    return perplexity(-float(scores.mean()))


def _change(scores: Floats, base: Floats) -> float | None:
    return finite(_ppl(scores) / _ppl(base) - 1)
