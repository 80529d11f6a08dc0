"""The alternatives: one set of tokens for all, and what none of the others beats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.config import load_config
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.evaluate.analysis.alternatives import AlternativesResult, frontier, measure, show
from gnnlm.evaluate.compare import AlternativeRun, ComparableRun, DocumentId, shared_places
from gnnlm.evaluate.report import LmFacts, PassageComparison, PassageRow
from gnnlm.run import Run
from gnnlm.run.analyze import Analysis, AnalysisOptions
from tests.evaluate.reports import MIX, make_report

ONE: list[DocumentId] = [("a", 2), ("b", 3), ("c", 1)]
TWO: list[DocumentId] = [("c", 1), ("d", 4), ("a", 2)]
SECONDS = {"encode": 60.0, "search train": 30.0, "search valid": 6.0, "train": 600.0}


def run_of(name: str, documents: list[DocumentId], kind: str = "frozen", **rows: list[float]) -> ComparableRun:
    report = make_report({row: {"tokens_per_second": 100.0 / (1 + place)} for place, row in enumerate(rows)})
    report = report.model_copy(update={"lm": LmFacts(kind=kind)})
    return ComparableRun(name, report, {row: np.array(scores) for row, scores in rows.items()}, documents, "lm")


def test_the_tokens_that_all_share() -> None:
    (one, two), document = shared_places([run_of("1", ONE, base=[0.0] * 6), run_of("2", TWO, base=[0.0] * 7)])
    assert one.tolist() == [0, 1, 5]
    assert two.tolist() == [5, 6, 0]
    assert document.tolist() == [0, 0, 1]


def test_perplexities_are_of_the_shared_tokens_and_costs_as_recorded() -> None:
    frozen = run_of("1", ONE, base=[-1, -2, -9, -9, -9, -3], gnn_knn=[-0.5, -1.5, -9, -9, -9, -2.5])
    tuned = run_of("2", TWO, "full", base=[-1, -9, -9, -9, -9, -1, -1], knn=[-0.9, -9, -9, -9, -9, -0.9, -0.9])
    candidates = [AlternativeRun(frozen, {}, SECONDS), AlternativeRun(tuned, {}, {"lm": 1200.0, **SECONDS})]
    found = measure(candidates, 100, 0)
    assert (found.tokens, found.documents, found.runs) == (3, 2, 2)
    base, book, full, _ = found.rows
    assert base.ppl == pytest.approx(np.exp(2))
    assert base.change == 0
    assert book.ppl == pytest.approx(np.exp(1.5))
    assert book.change == pytest.approx(np.exp(-0.5) - 1)
    assert book.change_low == pytest.approx(book.change_high), "each document gains the same"
    assert full.ppl == pytest.approx(np.exp(1))
    assert [row.preparation_minutes for row in found.rows] == pytest.approx([0, 11.6, 20, 21.1])
    assert [row.seconds_per_token for row in found.rows] == pytest.approx([0.01, 0.02, 0.01, 0.02])
    assert [row.best_by_seconds_per_token for row in found.rows] == [False, False, True, True]
    assert [row.best_by_preparation_minutes for row in found.rows] == [True, True, True, True]
    section = show(AlternativesResult.model_validate(json.loads(json.dumps(found.as_json()))))
    names = [row[1] for row in section.tables[0].cells()]
    assert names == ["frozen (1)", "frozen, +GNN+kNN (1)", "fine-tuned (2)", "fine-tuned, +kNN (2)"]
    assert "fine-tuned, +kNN (2) has the lowest perplexity, 2.46" in section.summary[0]
    assert "Not here: passages in the context" in section.sentences[-1]


def test_with_passages_all_are_on_the_tokens_that_were_read_with_them() -> None:
    run = run_of("1", ONE, base=[-1, -2, -9, -9, -9, -9])
    row = PassageRow(ppl=1.0, ppl_95=(1.0, 1.0), change=0.0, ppl_later=1.0, change_later=0.0, tokens_per_second=4.0)
    passages = PassageComparison(
        tokens=2, documents=1, later=64, later_tokens=0, count=1, length=1, query=1, stride=1, tokens_read=2.0,
        passages=3, valid_tokens=1, valid_base_ppl=1.0, tried=[], mix={"base": MIX},
        rows={"base": row, "passages": row},
    )  # fmt: skip
    run = ComparableRun("1", run.report.model_copy(update={"passages": passages}), run.scores, ONE, "lm")
    found = measure([AlternativeRun(run, {"passages": np.array([-1.0, -1.0])}, SECONDS)], 100, 0)
    assert found.tokens == 2
    base, read = found.rows
    assert base.ppl == pytest.approx(np.exp(1.5))
    assert read.ppl == pytest.approx(np.exp(1))
    assert (read.passages, read.row, read.seconds_per_token) == (True, "base", 0.25)
    assert show(found).tables[0].cells()[1][1] == "frozen, passages"


def test_runs_of_other_text_are_refused() -> None:
    runs = [run_of("1", ONE, base=[0.0] * 6), run_of("2", [("x", 1)], base=[0.0])]
    with pytest.raises(ConfigError, match="2 and 1 share no test document"):
        measure([AlternativeRun(run, {}, SECONDS) for run in runs], 100, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    best = frontier(points)
    assert any(best)
    for point, is_best in zip(points, best, strict=True):
        beaten = any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in points)
        assert is_best != beaten


def test_other_runs_are_named_once_and_remembered(tiny_run: Any, tmp_path: Path) -> None:
    first, second = (Path(shutil.copytree(tiny_run.root, tmp_path / name)) for name in ("first", "second"))

    def analysis(*others: Path) -> Analysis:
        return Analysis(Run(load_config(first), reading=True), AnalysisOptions(others=others))

    alone = analysis()
    found = alone.build(alone.plan(["alternatives"]))["alternatives"]
    assert [row["row"] for row in found["rows"]] == ["base", "knn", "gnn", "gnn_knn"]
    report = alone.subject.report
    for row in found["rows"]:
        assert row["ppl"] == pytest.approx(report.rows[row["row"]].ppl, rel=1e-5)
        assert row["change"] == pytest.approx(report.rows[row["row"]].change, abs=1e-5)
    both = analysis(second)
    (step,) = both.plan(["alternatives"])
    assert step.state == "stale"
    assert len(both.build([step])["alternatives"]["rows"]) == 8
    (step,) = analysis().plan(["alternatives"])
    assert step.state == "done", "what was named once stays on the page"
    shutil.rmtree(second / "report")
    with pytest.raises(ArtifactError, match="build it first"):
        analysis(second).plan(["alternatives"])
    later = analysis()
    assert len(later.build(later.plan(["alternatives"]))["alternatives"]["rows"]) == 4, "a run that is gone is left out"
