"""Whether a finished run can be trusted: its files, its index, its tables, and what its index costs.

What is served is checked: the segments of the current generation, with what was refitted for them. The tables are those
that the stages built. How far a changed store has drifted from what was trained is measured too; that is advice.

A check takes a `Checkup`, adds what it finds to it, and says what it did. New checks are added to `CHECKS`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact
from gnnlm.corpus.stream import SPLITS
from gnnlm.errors import ArtifactError, GnnlmError, LimitError
from gnnlm.generation import Generation, pinned
from gnnlm.generation.current import CURRENT
from gnnlm.layout import SEGMENTS
from gnnlm.progress import Track, say
from gnnlm.retrieval.index import Rows, keys_of, live_rows, segment_keys
from gnnlm.retrieval.index_recall import RECALL_KS, nearest, recall_of_index
from gnnlm.retrieval.segmented import SegmentedIndex
from gnnlm.run.leftovers import erased_segments, unserved_texts
from gnnlm.run.snapshot import Snapshot

if TYPE_CHECKING:
    from gnnlm.retrieval.neighbours import NeighbourTable
    from gnnlm.retrieval.search import Queries
    from gnnlm.run import Run
    from gnnlm.run.drift import Drift

QUERIES = 128  # valid positions whose neighbours are compared with exact search
OWN_ROWS = 256  # rows of each segment that are looked up by their own keys
TOKENS = 2000  # valid tokens that are scored with exact neighbours
LEAST_RECALL = 0.5  # of 128 neighbours: an index that finds less is of no use
LEAST_FOUND = 0.5  # share of rows that are among the 32 nearest of their own keys
MOST_COST = 0.05  # change of perplexity through the index
LINES = 4096  # lines of a table that are looked at at once


@dataclass
class Checkup:
    """A run at the generation that it serves, and what its checks have found so far."""

    run: Run
    generation: Generation = field(default_factory=Generation)
    problems: list[str] = field(default_factory=list)
    recall: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # whatever else the checks have measured, by name
    drift: list[Drift] = field(default_factory=list)

    @cached_property
    def snapshot(self) -> Snapshot:
        """The snapshot of what is served."""
        return self.run.snapshot.at(self.generation)

    @property
    def changed(self) -> bool:
        """Whether the store has changed since the run was built."""
        return self.generation.number > 0

    @property
    def ok(self) -> bool:
        return not self.problems

    def again(self, stage: str) -> str:
        """Return the command that builds what is served for a stage again."""
        if self.changed:
            return f"gnnlm refit {shlex.quote(str(self.run.root))} --part index"
        return f"gnnlm {stage} --rebuild"

    def has(self, stage: str) -> bool:
        return stage in self.run.stages and self.run.state(self.run.stages[stage]) == "done"

    def as_dict(self) -> dict[str, Any]:
        drift = {"generation": self.generation.number, **{each.part: each.as_dict() for each in self.drift}}
        return {"ok": self.ok, "recall": self.recall, "problems": self.problems, **self.facts, "drift": drift}


Check = Callable[[Checkup], None]


def examine(run: Run) -> Checkup:
    """Make every check. What is built on damaged files is not looked at."""
    try:
        served, lease = pinned(run.root)
    except ArtifactError as error:
        return Checkup(run, problems=[str(error)])
    try:
        return _examined(Checkup(run, served))
    finally:
        lease.release()


def _examined(checkup: Checkup) -> Checkup:
    for name, check in CHECKS.items():
        before = len(checkup.problems)
        try:
            check(checkup)
        except LimitError:
            raise  # it says nothing about the run
        except GnnlmError as error:
            checkup.problems.append(str(error))
        found = "; ".join(checkup.problems[before:])
        if found or check is not check_drift:  # whose findings are advice, with lines of their own
            say(f"doctor: {name}: {found or 'nothing is wrong'}")
        if name == "files" and not checkup.ok:
            say("doctor: what is in these files was not looked at")
            break
    return checkup


# -- files ---------------------------------------------------------------------------------------------------------


def check_files(checkup: Checkup) -> None:
    """Check that every stage is whole, was built from the stages before it, and has the bytes in its manifest."""
    run, known = checkup.run, dict[str, Any]()
    there = {name: run.state(stage, known) for name, stage in run.stages.items()}
    for name, state in there.items():
        if state in ("stale", "damaged"):
            checkup.problems.append(f"{run.path(name)} is {state}: {run.why(run.stages[name], state)}")
    unfinished = [name for name, state in there.items() if state in ("missing", "half-done")]
    checkup.facts["missing"] = unfinished
    if "index" in unfinished:
        raise ArtifactError(f"{run.root} has no index yet; build the run first: gnnlm run, with the same config")
    sizes = {name: run.bytes_of(name) for name, state in there.items() if state in ("done", "stale")}
    with Track("doctor: checksums", sum(sizes.values()), "bytes") as track:
        for name, size in sizes.items():
            _hash_all(run.path(name), checkup.problems)
            track.advance(size)
    built = [run.artifact(name) for name, stage in run.stages.items() if stage.part and checkup.has(name)]
    checkup.facts["erased"] = sorted(erased := erased_segments(built))
    if not all(erased.values()):
        say(f"doctor: erasing was interrupted; finish it: gnnlm compact {shlex.quote(str(run.root))} --erase")
    for text in unserved_texts(run.root, checkup.generation):
        say(
            f"doctor: {text} holds documents that are not served any more: removing them was interrupted, or somebody "
            f"read them until now; finish it: gnnlm compact {shlex.quote(str(run.root))} --erase"
        )
    if checkup.changed:
        _hash_served(checkup)


def _hash_served(checkup: Checkup) -> None:
    """Hash added segments and refitted artifacts of the current generation."""
    checkup.snapshot.check_current()
    served = checkup.generation
    parts = {segment.path_of(kind): found for segment in served.segments for kind, found in segment.parts.items()}
    own = {made.path: made.fingerprint for made in served.refitted.values()}
    for path, found in {**parts, **own}.items():
        if path.startswith(f"{SEGMENTS}/"):
            continue
        try:
            Artifact.open_part(checkup.run.root / path, found, checkup.run.root / CURRENT).verify(trust=False)
        except ArtifactError as error:
            checkup.problems.append(str(error))


def _hash_all(path: Path, problems: list[str]) -> None:
    try:
        artifact = Artifact.open(path, trust=False)
    except ArtifactError as error:
        problems.append(str(error))
        return
    for part in artifact.parts:
        try:
            part.verify(trust=False)
        except ArtifactError as error:
            problems.append(str(error))


# -- the index -----------------------------------------------------------------------------------------------------


def check_keys(checkup: Checkup) -> None:
    """Check that the index has every row of the store, and finds a sample of rows by their own keys."""
    snapshot = checkup.snapshot
    made, encoded = snapshot.artifact("index"), snapshot.artifact("encode")
    stream, index = snapshot.streams["train"], snapshot.index
    exact, rows = made.facts["kind"] == "exact", sum(len(Rows.of(segment)) for segment in stream.segments)
    says = made.facts["rows"] if not checkup.changed else sum(part.facts["rows"] for part in made.parts)
    if says != rows and not (exact and checkup.changed):
        checkup.problems.append(f"the index says that it has {says:,} rows, but the store has {rows:,}")
    if exact:
        return
    assert isinstance(index, SegmentedIndex)
    for number, (segment, live) in enumerate(zip(stream.segments, snapshot.live, strict=True)):
        keys, own = segment_keys(encoded, number), live_rows(segment, [live])
        if not len(own):
            continue
        drawn = np.sort(np.random.default_rng(number).permutation(len(own))[:OWN_ROWS])
        positions_N = own.positions(torch.from_numpy(drawn))
        keys_ND = _rows_of(keys, positions_N)
        found = index.segment(number).search(keys_ND, 32)
        there_N = (found.positions == positions_N[:, None]).any(1)
        alike_N = index.segment(number).similarity(keys_ND, found.positions)[:, -1] >= _own(keys_ND, index.metric)
        share = float((there_N | alike_N).float().mean())  # or 32 others are exactly as near
        if share < LEAST_FOUND:
            checkup.problems.append(
                f"the index of segment {number} finds {share:.0%} of its rows by their own keys: it was made from "
                f"other keys; rebuild it: {checkup.again('index')}"
            )


def _own(keys_ND: Tensor, metric: str) -> float:
    return 1.0 - 1e-5 if metric == "cosine" else -1e-5


def check_recall(checkup: Checkup) -> None:
    """Measure recall against exact search, over the whole store and in each segment."""
    snapshot = checkup.snapshot
    made, encoded, stream = snapshot.artifact("index"), snapshot.artifact("encode"), snapshot.streams["train"]
    if made.facts["kind"] == "exact":
        checkup.recall.update({str(k): 1.0 for k in RECALL_KS})
        return
    valid = keys_of(encoded, "valid")
    drawn = np.sort(np.random.default_rng(checkup.run.config.seed + 1).permutation(len(valid))[:QUERIES])
    keys_ND, index = _rows_of(valid, torch.from_numpy(drawn)), snapshot.index
    assert isinstance(index, SegmentedIndex)
    segments = []
    with Track("doctor: exact search", len(stream.segments) + 1, "stores") as track:
        found = recall_of_index(index, keys_ND, keys_of(encoded, "train"), live_rows(stream, snapshot.live), RECALL_KS)
        track.advance(1)
        for number, (segment, live) in enumerate(zip(stream.segments, snapshot.live, strict=True)):
            keys, rows = segment_keys(encoded, number), live_rows(segment, [live])
            nothing = dict.fromkeys(RECALL_KS, 1.0)  # there is none to be missed
            one = recall_of_index(index.segment(number), keys_ND, keys, rows, RECALL_KS) if len(rows) else nothing
            segments.append(one)
            track.advance(1)
    checkup.recall.update({str(k): value for k, value in found.items()})
    checkup.facts["segments"] = [{str(k): value for k, value in each.items()} for each in segments]
    words = ", ".join(f"recall@{k} {value:.3f}" for k, value in found.items())
    say(f"doctor: {words}, on {len(drawn)} valid positions")
    if found[128] < LEAST_RECALL:
        checkup.problems.append(
            f"the index finds {found[128]:.0%} of the 128 nearest rows, where at least {LEAST_RECALL:.0%} are "
            "expected; raise index.probes, or build another index (index.kind)"
        )


# -- the tables ----------------------------------------------------------------------------------------------------


def check_tables(checkup: Checkup) -> None:
    """Check that neighbours are sorted, are in the store, have a token, and keep the leakage rule."""
    from gnnlm.retrieval.search import open_table
    from gnnlm.retrieval.search_stage import SEARCH

    if not checkup.has("search"):
        return
    if checkup.facts["erased"]:
        say(
            "doctor: the tables were not looked at: they are of the store as it was built, of which segments were "
            "erased, and nothing reads them any more"
        )
        return
    run = checkup.run
    built, tables = run.snapshot, run.artifact("search")
    stream = built.streams["train"]
    has_token_P = np.ones(len(stream), dtype=bool)
    has_token_P[stream.starts[1:] - 1] = False
    for queries in SEARCH.queries(built, tables.inputs, SPLITS):
        split = queries.stream.split
        _check_table(checkup, split, open_table(tables, split), queries, has_token_P)


def _check_table(
    checkup: Checkup, split: str, table: NeighbourTable, queries: Queries, has_token_P: np.ndarray[Any, Any]
) -> None:
    wrong: dict[str, int] = {}
    with Track(f"doctor: table of {split}", len(table), "lines") as track:
        for start in range(0, len(table), LINES):
            ids, similarity = (np.asarray(a[start : start + LINES]) for a in (table.ids, table.similarity))
            positions = table.positions(torch.arange(start, start + len(ids))).numpy()
            missing = ids < 0
            outside = (ids < -1) | (ids >= len(has_token_P))
            inside = np.where(missing | outside, 0, ids)
            found = {
                "are not in the store": outside,
                "have no token": ~has_token_P[inside] & ~missing & ~outside,
                "are not sorted": ~(similarity[:, :-1] >= similarity[:, 1:]),
                "are missing before others": missing[:, :-1] & ~missing[:, 1:],
                "have a similarity that is no number": ~np.isfinite(similarity) & ~missing,
            }
            if (allowed := queries.allowed(positions, queries.places)) is not None and allowed.barred is not None:
                low, high = (end.numpy()[:, None] for end in allowed.barred)
                found["are barred by the leakage rule"] = (ids >= low) & (ids <= high) & ~missing
            for what, where in found.items():
                wrong[what] = wrong.get(what, 0) + int(where.sum())
            track.advance(len(ids))
    for what, count in wrong.items():
        if count:
            checkup.problems.append(
                f"{count:,} neighbours of {split} positions {what}; search again: gnnlm search --rebuild"
            )


# -- the cost ------------------------------------------------------------------------------------------------------


def check_cost(checkup: Checkup) -> None:
    """Compare perplexity with the run's neighbours to perplexity with those of exact search.

    They are those of its tables, or, if the store has changed since, what its index finds.
    """
    from gnnlm.predict.predictor import perplexity
    from gnnlm.predict.split_scoring import SearchedText, score_text
    from gnnlm.retrieval.neighbours import NeighbourTable
    from gnnlm.retrieval.search import search_table

    if not checkup.has("tune"):
        return
    snapshot, config = checkup.snapshot, checkup.run.config
    encoded, made, text = snapshot.artifact("encode"), snapshot.artifact("index"), snapshot.encoded["valid"]
    positions_P = torch.arange(min(TOKENS, len(text)))
    keys_PD = _rows_of(keys_of(encoded, "valid"), positions_P)
    if not checkup.changed:
        valid = snapshot.searched("valid")
    else:
        shard = config.search.shard_queries
        own = search_table(snapshot.index, keys_PD, config.search.k, shard, "doctor: search of valid", positions_P)
        valid = SearchedText(text, own, config.lm.continuous)
    rows, predictor, block = live_rows(snapshot.streams["train"], snapshot.live), snapshot.predictor, config.eval.block
    stored, metric, label = keys_of(encoded, "train"), made.facts["metric"], "doctor: exact search of valid"
    found = nearest(keys_PD, stored, rows, valid.table.k, metric, label)
    table = NeighbourTable(found.positions.numpy(), found.similarity.numpy(), positions_P)
    tables = {"own": valid, "exact": replace(valid, table=table)}
    costs: dict[str, dict[str, float]] = {}
    for which, searched in tables.items():
        label = f"doctor: score valid, {which} neighbours"
        scores, _ = score_text(predictor, searched, block, label, predictor.names, positions_P)
        for name, values in scores.items():
            costs.setdefault(name, {})[which] = perplexity(-float(values.mean()))
    checkup.facts["perplexity"] = costs
    say("doctor: perplexity of valid with the run's neighbours (and with those of exact search): "
        + ", ".join(f"{name} {cost['own']:.3f} ({cost['exact']:.3f})" for name, cost in costs.items()))  # fmt: skip
    for name, cost in costs.items():
        change = cost["own"] / cost["exact"] - 1
        if not abs(change) <= MOST_COST:
            checkup.problems.append(
                f"perplexity of {name} is {cost['own']:.3f} with the run's neighbours, but {cost['exact']:.3f} with "
                f"those of exact search; raise index.probes, or make them again: {checkup.again('search')}"
            )


# -- drift ---------------------------------------------------------------------------------------------------------


def check_drift(checkup: Checkup) -> None:
    """Whether what was trained still fits a store that has changed since; never a problem."""
    from gnnlm.run.drift import Measuring

    if not checkup.changed or not checkup.has("tune"):
        return
    try:
        for found in Measuring(checkup.snapshot).all():
            checkup.drift.append(found)
    except LimitError:
        raise
    except GnnlmError as error:
        say(f"doctor: drift was not measured: {error}")


def _rows_of(keys: Any, positions_N: Tensor) -> Tensor:
    from gnnlm.datastore.store import read_rows

    return read_rows(keys, positions_N)


CHECKS: dict[str, Check] = {
    "files": check_files,
    "keys": check_keys,
    "recall": check_recall,
    "tables": check_tables,
    "cost": check_cost,
    "drift": check_drift,
}
