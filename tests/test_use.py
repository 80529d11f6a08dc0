"""The commands that use a finished run."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest

import gnnlm as package
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.run import Run
from tests.cli import Process, error_line, finished, gnnlm


@pytest.fixture
def text(tiny_run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(tiny_run.snapshot.streams["test"].documents[0].text[:40], encoding="utf-8")
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
    flags = ("--json", "--predictor", "knn", "--only", "doc0*")
    done = finished(Process("gnnlm", "score", tiny_run.root, "-", *flags, given=text.read_text()))
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last["perplexity"]) == {"knn"}
    want = package.open(tiny_run.root).score(text.read_text(), predictors=["knn"], only="doc0*")
    assert last["perplexity"]["knn"] == pytest.approx(want.perplexity("knn"), rel=1e-3)


def test_neighbors(tiny_run: Run) -> None:
    train = tiny_run.snapshot.streams["train"].documents[0]
    words = train.text[:12]
    done = gnnlm("neighbors", tiny_run.root, words, "-k", "2", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["token"] for line in lines[:-1]] == list(words)
    first = lines[8]["neighbors"][0]
    assert first["document"] == train.name
    assert first["token"] == words[8] == train.text[first["start"] : first["end"]]
    shown = gnnlm("neighbors", tiny_run.root, words, "--exclude", train.name).stdout
    assert train.name not in shown


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


def test_generate(tiny_run: Run) -> None:
    done = gnnlm("generate", tiny_run.root, "ban dor ", "--max-tokens", "12", "--predictor", "knn", "--json")
    got = json.loads(done.stdout.splitlines()[-1])
    want = package.open(tiny_run.root).generate("ban dor ", max_tokens=12, predictor="knn")
    assert got["text"] == want.text
    assert [token["id"] for token in got["tokens"]] == want.ids
    assert set(got["tokens"][0]) == {"text", "id", "log_prob", "base_log_prob", "book", "sources"}
    sources = [source for token in got["tokens"] for source in token["sources"]]
    assert {"document", "start", "end", "before", "token", "after", "similarity", "share"} <= set(sources[0])
    assert got["finish_reason"] == "length"
    shown = gnnlm("generate", tiny_run.root, "ban dor ", "--max-tokens", "12", "--predictor", "knn").stdout
    assert shown.startswith("ban dor " + want.text[:3])
    assert "12 tokens (length)" in shown
    several = gnnlm(
        "generate", tiny_run.root, "ban", "dor", "-n", "2", "--max-tokens", "3", "--temperature", "1", "--json"
    )
    assert len(several.stdout.splitlines()) == 4


def test_generate_refuses_bad_values_before_loading(tiny_run: Run) -> None:
    assert "temperature: expected a number from 0 to 100, got -1" in error_line(
        "generate", tiny_run.root, "x", "--temperature", "-1"
    )
    assert "no predictor named 'gpt'" in error_line("generate", tiny_run.root, "x", "--predictor", "gpt")
    assert "no chat template" in error_line("generate", tiny_run.root, "x", "--chat")


def test_ctrl_c_keeps_what_was_written(tiny_run: Run) -> None:
    flags = ("--max-tokens", "1000000", "--no-draft")
    with Process("gnnlm", "generate", tiny_run.root, "ban dor ", *flags) as process:
        process.wait_until(lambda: len(process.output) >= 40)  # past the prompt: it is writing
        process.send_signal(signal.SIGINT)
        assert "(interrupted)" in finished(process).stdout


def test_attached_files_and_own_past(tiny_run: Run, text: Path, tmp_path: Path) -> None:
    notes, book = tmp_path / "notes.txt", package.open(tiny_run.root)
    notes.write_text(text.read_text() * 2, encoding="utf-8")
    long = tmp_path / "long.txt"
    long.write_text("\n".join([text.read_text()] * 4), encoding="utf-8")
    done = gnnlm("score", tiny_run.root, long, "--attach", notes, "--own-past", "--json")
    want = book.score(long.read_text(), attach=[notes], own_past=True)
    last = json.loads(done.stdout.splitlines()[-1])
    for name in PREDICTORS:
        assert last["perplexity"][name] == pytest.approx(want.perplexity(name), rel=1e-3)
    done = gnnlm("neighbors", tiny_run.root, text.read_text()[:9], "-k", "1", "--attach", notes, "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()[:-1]]
    assert found[-1]["neighbors"][0]["document"] == "attached:notes.txt"
    flags = ("--max-tokens", "12", "--json", "--own-past")
    done = gnnlm("generate", tiny_run.root, long.read_text(), "--attach", notes, "--attach", long, *flags)
    written = json.loads(done.stdout.splitlines()[-1])
    want_text = book.generate(long.read_text(), max_tokens=12, attach=[notes, long], own_past=True)
    assert written["text"] == want_text.text
    assert "no such file" in error_line("score", tiny_run.root, long, "--attach", tmp_path / "nothing.txt")
