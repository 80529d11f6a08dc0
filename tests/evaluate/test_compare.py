"""Runs beside each other: percentages only between figures that can be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gnnlm.config import parse_config
from gnnlm.evaluate.compare import Finished, comparison, remarks
from gnnlm.run import Run
from tests.cli import gnnlm
from tests.conftest import write_texts
from tests.evaluate.reports import make_report


def finished(name: str, test: str = "text", lm: str = "lm", model: str = "tiny", **ppl: float | None) -> Finished:
    return Finished(name, make_report({row: {"ppl": value} for row, value in ppl.items()}, model), test, lm)


def shown(runs: list[Finished]) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(comparison(runs))
    return [line.split("  ") for line in capture.get().splitlines()]


def cells(runs: list[Finished], line: int) -> list[str]:
    return [cell.strip() for cell in shown(runs)[line] if cell.strip()]


def test_changes_against_the_first_run() -> None:
    runs = [finished("a", base=20.0, gnn=10.0), finished("b", base=20.0, gnn=9.0)]
    assert cells(runs, 1)[:3] == ["a", "20.00", "10.00"]
    assert cells(runs, 2)[:3] == ["b", "20.00 (+0.0%)", "9.00 (-10.0%)"]
    assert remarks(runs) == ["Percentages are changes against the same row of a."]


def test_other_text_has_no_percentages() -> None:
    """Not even where the same number of tokens was tested, at the same perplexity."""
    same, other = finished("same", knn=5.0), finished("other", test="other text", knn=5.0)
    runs = [finished("a", knn=5.0), same, other]
    assert cells(runs, 2)[1] == "5.00 (+0.0%)"
    assert cells(runs, 3)[1] == "5.00"
    assert remarks(runs)[1:] == [
        "other and a have different test text or tokens (1,000 and 1,000 tokens): their figures cannot be compared."
    ]
    assert remarks([runs[0], other])[0].startswith("other and a have different test text")


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
    assert cells(runs, 2)[:4] == ["b", "10.00 (-50.0%)", "9.00", "8.00"]


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
    assert shown.count("(+0.0%)") == 4
    assert shown.splitlines()[-1] == f"Percentages are changes against the same row of {tiny_run.root}."


def replace_run(run: Run, folder: Path) -> Run:
    forked = Run(run.config.model_copy(update={"run": str(folder)}))
    run.fork(forked.config)
    return forked


def test_a_base_model_trained_in_the_run(tiny_run: Run) -> None:
    corpus, report = tiny_run.artifact("corpus"), finished("a", base=1.0).report
    frozen = Finished.of("frozen", report, corpus, None)
    trained = Finished.of("trained", report, corpus, tiny_run.artifact("train"))
    assert frozen.test == trained.test
    assert frozen.base != trained.base
    assert replace(trained, base=frozen.base, name="frozen") == frozen
