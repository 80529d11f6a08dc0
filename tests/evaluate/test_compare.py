"""Runs beside each other: percentages only between figures that can be compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gnnlm.config import parse_config
from gnnlm.evaluate.compare import ComparableRun, DocumentId, SharedTokens, change_of, comparison, remarks
from gnnlm.evaluate.report import read_report
from gnnlm.predict.bootstrap import bootstrap_interval
from gnnlm.run import Run
from tests.cli import gnnlm
from tests.conftest import write_texts
from tests.evaluate.reports import make_report

DOCUMENTS = [("one", 2), ("two", 3), ("three", 1), *((f"more {number}", 1) for number in range(9))]


def finished(
    name: str, documents: list[DocumentId] = DOCUMENTS, lm: str = "lm", model: str = "tiny", **ppl: float | None
) -> ComparableRun:
    """A run in which every token has the same probability, so that the perplexities are as given."""
    tokens = sum(size for _, size in documents)
    scores = {row: np.full(tokens, -np.inf if value is None else -np.log(value)) for row, value in ppl.items()}
    report = make_report({row: {"ppl": value} for row, value in ppl.items()}, model)
    return ComparableRun(name, report, {"base": np.zeros(tokens), **scores}, documents, lm)


def shown(runs: list[ComparableRun]) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(comparison(runs))
    return [line.split("  ") for line in capture.get().splitlines()]


def cells(runs: list[ComparableRun], line: int) -> list[str]:
    return [cell.strip() for cell in shown(runs)[line] if cell.strip()]


def test_changes_against_the_first_run() -> None:
    runs = [finished("a", base=20.0, gnn=10.0), finished("b", base=20.0, gnn=9.0)]
    assert cells(runs, 1)[:3] == ["a", "20.00", "10.00"]
    assert cells(runs, 2)[:3] == ["b", "20.00 [+0.0% (+0.0 to +0.0), n.s.]", "9.00 [-10.0% (-10.0 to -10.0)]"]
    (remark,) = remarks(runs)
    assert remark.startswith("Percentages are changes against the same row of a, with the 95% interval")


def test_a_paired_interval_against_a_plain_loop() -> None:
    """Hard and easy documents: the perplexities scatter, their change does not, and a small one is significant."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(5, 40, 12)
    documents = [(f"d{number}", int(size)) for number, size in enumerate(sizes)]
    hard = np.repeat(rng.uniform(1, 6, 12), sizes)
    was = -hard - rng.uniform(0, 1, len(hard))
    now = was + rng.normal(0.05, 0.1, len(hard))
    first = ComparableRun("a", make_report({"gnn": {}}), {"base": was, "gnn": was}, documents, "lm")
    run = ComparableRun("b", make_report({"gnn": {}}), {"base": was, "gnn": now}, documents, "lm")
    change = change_of(run, first, "gnn", SharedTokens.between(run, first))
    assert change is not None
    assert change.change_low is not None
    assert change.change_high is not None
    number, ratios = np.repeat(np.arange(12), sizes), []
    draws = np.random.default_rng(1)
    for _ in range(1000):
        drawn = np.concatenate([np.flatnonzero(number == d) for d in draws.choice(12, 12)])
        ratios.append(np.exp(-now[drawn].mean()) / np.exp(-was[drawn].mean()) - 1)
    np.testing.assert_allclose((change.change_low, change.change_high), np.quantile(ratios, [0.025, 0.975]), atol=0.004)
    assert change.is_significant
    low, high = bootstrap_interval(now, number, 1000, 0)
    assert low < np.exp(-was.mean()) < high  # the intervals of the perplexities overlap all the same


def test_other_text_has_no_percentages() -> None:
    """Not even where the same number of tokens was tested, at the same perplexity."""
    same, other = finished("same", knn=5.0), finished("other", [("other", 6)], knn=5.0)
    runs = [finished("a", knn=5.0), same, other]
    assert cells(runs, 2)[1] == "5.00 [+0.0% (+0.0 to +0.0), n.s.]"
    assert cells(runs, 3)[1] == "5.00"
    assert remarks(runs)[1:] == [
        "other and a have different test text or tokens (1,000 and 1,000 tokens): their figures cannot be compared."
    ]
    assert remarks([runs[0], other])[0].startswith("other and a have different test text")


def test_some_of_the_text_is_compared_by_name() -> None:
    """In another order, with a document less and another more: only shared tokens count."""
    first = finished("a", knn=5.0)
    scores = np.log([0.001, 0.001, 0.001, 0.25, 0.5, 0.5, 0.5])  # new, new, new, three, two, two, two
    documents = [("new", 3), ("three", 1), ("two", 3)]
    run = ComparableRun("b", make_report({"knn": {"ppl": 9.0}}), {"base": np.zeros(7), "knn": scores}, documents, "lm")
    shared = SharedTokens.between(run, first)
    assert (shared.here.tolist(), shared.there.tolist()) == ([3, 4, 5, 6], [5, 2, 3, 4])
    assert shared.document.tolist() == [0, 1, 1, 1]
    change = change_of(run, first, "knn", shared)
    assert change is not None
    assert change.change == pytest.approx((4 * 2**3) ** 0.25 / 5 - 1)
    assert (change.change_low, change.change_high) == pytest.approx(
        (2 / 5 - 1, 4 / 5 - 1)
    )  # either document twice, or each once
    said = remarks([first, run])
    assert "the 2 documents that both have by name, with equal text and tokens (4 tokens)" in said[1]
    assert said[2] == "b and a share fewer than 10 test documents (2): intervals are too narrow."
    one = SharedTokens.between(finished("c", [("one", 2)], knn=4.0), first)
    alone = change_of(finished("c", [("one", 2)], knn=4.0), first, "knn", one)
    assert alone is not None
    assert (alone.words, alone.is_significant) == ("-20.0%", False)


def test_different_base_models_are_noted() -> None:
    first = finished("a", knn=5.0)
    assert remarks([first, finished("b", lm="x", model="big", knn=4.0)])[1] == (
        "b and a have different base models (big and tiny)."
    )
    assert remarks([first, finished("b", lm="x", knn=4.0)])[1] == (
        "b and a have different base models (both tiny, not the same weights)."
    )


def test_fewer_rows_and_infinite_figures() -> None:
    runs = [finished("a", base=20.0, knn=None), finished("b", base=10.0, knn=9.0, gnn=8.0)]
    assert shown(runs)[0][0].split()[0] == "run"
    assert cells(runs, 1)[:4] == ["a", "20.00", "inf", "-"]
    assert cells(runs, 2)[:4] == ["b", "10.00 [-50.0% (-50.0 to -50.0)]", "9.00", "8.00"]


@pytest.fixture(scope="module")
def other_text(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run like the tiny one, on other text."""
    texts = write_texts(tmp_path_factory.mktemp("texts"), seed=5)
    values = tiny_run.config.model_dump(mode="json")
    values["corpus"]["source"], values["run"] = str(texts), str(tmp_path_factory.mktemp("runs") / "other")
    values["train"]["curriculum"] = [{"k": 4, "steps": 1}]
    run = Run(parse_config(values))
    run.build_all()
    return run


def test_command_line(tiny_run: Run, other_text: Run, tmp_path: Path) -> None:
    shown = gnnlm("compare", tiny_run.root, other_text.root).stdout
    assert "%" not in shown
    assert f"{other_text.root} and {tiny_run.root} have different test text or tokens" in shown
    assert "base models" not in shown
    forked = replace_run(tiny_run, tmp_path / "fork")
    shown = gnnlm("compare", tiny_run.root, forked.root).stdout
    assert shown.count("[+0.0% (+0.0 to +0.0), n.s.]") == 4
    assert f"Percentages are changes against the same row of {tiny_run.root}, " in shown
    assert "share fewer than 10 test documents (2)" in shown


def replace_run(run: Run, folder: Path) -> Run:
    forked = Run(run.config.model_copy(update={"run": str(folder)}))
    run.fork(forked.config)
    return forked


def test_a_base_model_trained_in_the_run(tiny_run: Run) -> None:
    corpus, scored = tiny_run.artifact("corpus"), tiny_run.artifact("eval")
    report = read_report(scored)
    frozen = ComparableRun.of("frozen", report, scored, corpus, None)
    trained = ComparableRun.of("trained", report, scored, corpus, tiny_run.artifact("train"))
    assert frozen.documents == trained.documents
    assert [size for _, size in frozen.documents] == [document.tokens for document in report.documents]
    assert len({key for key, _ in frozen.documents}) == report.test_documents
    assert frozen.base != trained.base
