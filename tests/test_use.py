"""The commands that use a finished run."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

import gnnlm as package
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.run import Run
from tests.cli import COMMAND, error_line, gnnlm


@pytest.fixture
def text(tiny_run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(tiny_run.parts.streams["test"].documents[0]["text"][:40], encoding="utf-8")
    return path


def test_score(tiny_run: Run, text: Path) -> None:
    lines = [json.loads(line) for line in gnnlm("score", tiny_run.root, text, "--json").stdout.splitlines()]
    want = package.open(tiny_run.root).score(text.read_text())
    assert len(lines) == 41
    for number, line in enumerate(lines[:-1]):
        assert (line["token"], line["id"]) == (want.tokens[number], want.ids[number])
        assert (line["start"], line["end"]) == want.offsets[number]
        for name in PREDICTORS:
            assert line["log_probs"][name] == pytest.approx(float(want.log_probs[name][number]), abs=1e-4)
            assert line["top1"][name] == bool(want.top1[name][number])
    assert lines[-1]["tokens"] == 40
    for name in PREDICTORS:
        assert lines[-1]["perplexity"][name] == pytest.approx(want.perplexity(name), rel=1e-3)
    shown = gnnlm("score", tiny_run.root, text).stdout
    assert "40 tokens; perplexity: base" in shown
    assert f"{math.exp(want.base[0]):.4f}" in shown
    assert "gain: log-probability of gnn_knn minus that of base" in shown


def test_score_of_standard_input_with_filters(tiny_run: Run, text: Path) -> None:
    command = [*COMMAND, "score", str(tiny_run.root), "-", "--json", "--predictor", "knn", "--only", "doc0*"]
    done = subprocess.run(command, input=text.read_bytes(), capture_output=True, timeout=200, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last["perplexity"]) == {"knn"}
    want = package.open(tiny_run.root).score(text.read_text(), predictors=["knn"], only="doc0*")
    assert last["perplexity"]["knn"] == pytest.approx(want.perplexity("knn"), rel=1e-3)


def test_neighbors(tiny_run: Run) -> None:
    train = tiny_run.parts.streams["train"].documents[0]
    words = train["text"][:12]
    done = gnnlm("neighbors", tiny_run.root, words, "-k", "2", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["token"] for line in lines[:-1]] == list(words)
    first = lines[8]["neighbors"][0]
    assert first["document"] == train["name"]
    assert first["token"] == words[8] == train["text"][first["start"] : first["end"]]
    shown = gnnlm("neighbors", tiny_run.root, words, "--exclude", train["name"]).stdout
    assert train["name"] not in shown


def test_refusals(tiny_run: Run, tmp_path: Path) -> None:
    assert "no such file" in error_line("score", tiny_run.root, tmp_path / "nope.txt")
    (tmp_path / "odd.txt").write_bytes(b"a\xff")
    assert "is not UTF-8 (byte 1)" in error_line("score", tiny_run.root, tmp_path / "odd.txt")
    (tmp_path / "empty.txt").write_text("")
    assert "nothing to score" in error_line("score", tiny_run.root, tmp_path / "empty.txt")
    (tmp_path / "text.txt").write_text("abc")
    told = error_line("score", tiny_run.root, tmp_path / "text.txt", "--predictor", "best")
    assert "no predictor named 'best'; this run has base, knn, gnn, gnn_knn" in told
    assert "no document of the store" in error_line("neighbors", tiny_run.root, "abc", "--only", "nope")
