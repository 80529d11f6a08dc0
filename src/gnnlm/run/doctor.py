"""Whether a finished run can be trusted: its files, its index, its tables, and what its index costs.

A check takes a `Checkup`, adds what it finds to it, and says what it did. New checks are added to `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gnnlm.artifact import Artifact, files_of
from gnnlm.artifact.manifest import erased_files
from gnnlm.errors import ArtifactError, GnnlmError
from gnnlm.generation.place import CURRENT, read_current
from gnnlm.progress import Track, say
from gnnlm.retrieval.index import Rows, key_file, keys_of
from gnnlm.retrieval.recall import RECALL_KS, nearest, recall_of_index
from gnnlm.retrieval.segmented import SegmentedIndex

if TYPE_CHECKING:
    from gnnlm.retrieval.neighbours import NeighbourTable
    from gnnlm.retrieval.search import Queries
    from gnnlm.run import Run

QUERIES = 128  # valid positions whose neighbours are compared with exact search
OWN_ROWS = 256  # rows of each segment that are looked up by their own keys
TOKENS = 2000  # valid tokens that are scored with exact neighbours
LEAST_RECALL = 0.5  # of 128 neighbours: an index that finds less is of no use
LEAST_FOUND = 0.5  # share of rows that are among the 32 nearest of their own keys
MOST_COST = 0.05  # change of perplexity through the index
LINES = 4096  # lines of a table that are looked at at once


@dataclass
class Checkup:
    """A run, and what its checks have found so far."""

    run: Run
    problems: list[str] = field(default_factory=list)
    recall: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # whatever else the checks have measured, by name

    @property
    def ok(self) -> bool:
        return not self.problems

    def has(self, stage: str) -> bool:
        return stage in self.run.stages and self.run.state(self.run.stages[stage]) == "done"

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "recall": self.recall, "problems": self.problems, **self.facts}


Check = Callable[[Checkup], None]


def examine(run: Run) -> Checkup:
    """Make every check. What is built on damaged files is not looked at."""
    checkup = Checkup(run)
    for name, check in CHECKS.items():
        before = len(checkup.problems)
        try:
            check(checkup)
        except GnnlmError as error:
            checkup.problems.append(str(error))
        say(f"doctor: {name}: " + ("; ".join(checkup.problems[before:]) or "nothing is wrong"))
        if name == "files" and not checkup.ok:
            say("doctor: what is in these files was not looked at")
            break
        if name == "files" and checkup.facts["erased"]:
            say("doctor: segments that the stages built were erased, so index and tables cannot be compared with them")
            break
    return checkup


# -- files ---------------------------------------------------------------------------------------------------------


def check_files(checkup: Checkup) -> None:
    """Every stage is whole, was made from the stages before it, and has the bytes that its manifest says."""
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
    texts = run.artifact("corpus").parts
    checkup.facts["erased"] = sorted(text.path.parent.name for text in texts if erased_files(text.path))
    _hash_added(run, checkup.problems)


def _hash_added(run: Run, problems: list[str]) -> None:
    """The segments that the current generation has beside those of the stages."""
    generation = read_current(run.root)
    for segment in generation.segments if generation is not None else ():
        for kind, found in segment.parts.items() if segment.is_added else ():
            try:
                Artifact.open_part(run.root / segment.name / kind, found, run.root / CURRENT).verify(trust=False)
            except ArtifactError as error:
                problems.append(str(error))


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
    """The index has a row for each of the store's, and finds some of them by their own keys."""
    made, encoded = checkup.run.artifact("index"), checkup.run.artifact("encode")
    stream, index = checkup.run.parts.streams["train"], checkup.run.parts.index
    rows = sum(len(Rows.of(segment)) for segment in stream.segments)
    if made.facts["rows"] != rows:
        checkup.problems.append(f"the index says that it has {made.facts['rows']:,} rows, but the store has {rows:,}")
    if made.facts["kind"] == "exact":
        return
    assert isinstance(index, SegmentedIndex)
    for number, segment in enumerate(stream.segments):
        keys, own = files_of(encoded, "train.")[number].array(key_file(encoded)), Rows.of(segment)
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
                "other keys; rebuild it: gnnlm index --rebuild"
            )


def _own(keys_ND: Tensor, metric: str) -> float:
    return 1.0 - 1e-5 if metric == "cosine" else -1e-5


def check_recall(checkup: Checkup) -> None:
    """What the index finds of what exact search finds, over the whole store and in each segment."""
    run = checkup.run
    made, encoded, stream = run.artifact("index"), run.artifact("encode"), run.parts.streams["train"]
    if made.facts["kind"] == "exact":
        checkup.recall.update({str(k): 1.0 for k in RECALL_KS})
        return
    valid = keys_of(encoded, "valid")
    drawn = np.sort(np.random.default_rng(run.config.seed + 1).permutation(len(valid))[:QUERIES])
    keys_ND, index = _rows_of(valid, torch.from_numpy(drawn)), run.parts.index
    assert isinstance(index, SegmentedIndex)
    segments = []
    with Track("doctor: exact search", len(stream.segments) + 1, "stores") as track:
        found = recall_of_index(index, keys_ND, keys_of(encoded, "train"), Rows.of(stream), RECALL_KS)
        track.advance(1)
        for number, segment in enumerate(stream.segments):
            keys = files_of(encoded, "train.")[number].array(key_file(encoded))
            segments.append(recall_of_index(index.segment(number), keys_ND, keys, Rows.of(segment), RECALL_KS))
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
    """Neighbours are sorted, in the store, have a token, and none is barred by the leakage rule."""
    from gnnlm.retrieval.search import open_table

    if not checkup.has("search"):
        return
    run = checkup.run
    stream, tables = run.parts.streams["train"], run.artifact("search")
    has_token_P = np.ones(len(stream), dtype=bool)
    has_token_P[stream.starts[1:] - 1] = False
    for queries in run.parts.queries:
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
    """Perplexity with the run's neighbours and similarities, and with those of exact search."""
    from gnnlm.predict.predictor import perplexity
    from gnnlm.predict.score import score_text
    from gnnlm.retrieval.neighbours import NeighbourTable

    if not checkup.has("tune"):
        return
    run = checkup.run
    encoded, made, valid = run.artifact("encode"), run.artifact("index"), run.parts.searched("valid")
    positions_P = torch.arange(min(TOKENS, len(valid.text)))
    keys_PD = _rows_of(keys_of(encoded, "valid"), positions_P)
    rows, predictor, block = Rows.of(run.parts.streams["train"]), run.parts.predictor, run.config.eval.block
    stored, metric, label = keys_of(encoded, "train"), made.facts["metric"], "doctor: exact search of valid"
    found = nearest(keys_PD, stored, rows, valid.table.k, metric, label)
    table = NeighbourTable(found.positions.numpy(), found.similarity.numpy(), positions_P)
    tables = {"own": valid, "exact": replace(valid, table=table)}
    costs: dict[str, dict[str, float]] = {}
    for which, text in tables.items():
        label = f"doctor: score valid, {which} neighbours"
        scores, _ = score_text(predictor, text, block, label, predictor.names, positions_P)
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
                "those of exact search; raise index.probes, or search again: gnnlm search --rebuild"
            )


def _rows_of(keys: Any, positions_N: Tensor) -> Tensor:
    from gnnlm.datastore.store import read_rows

    return read_rows(keys, positions_N)


CHECKS: dict[str, Check] = {
    "files": check_files,
    "keys": check_keys,
    "recall": check_recall,
    "tables": check_tables,
    "cost": check_cost,
}
