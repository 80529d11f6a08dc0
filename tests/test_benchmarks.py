"""The benchmarks run and say what they promise; how fast anything is, no test decides.

`make test` runs the quick ones, `make test-slow` all of them.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from gnnlm.config import load_config
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.run import Run
from tests.cli import Process, finished

FOLDER = Path(__file__).parent.parent / "benchmarks"


def last_line(script: str, *arguments: str) -> dict[str, Any]:
    done = finished(Process(FOLDER / script, *arguments))
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_scoring(tiny_run: Run) -> None:
    result = last_line("scoring.py", "--run", str(tiny_run.root), "--tokens", "200", "--k", "2", "8", "--json")
    assert [case["k"] for case in result["cases"]] == [2, 8]
    assert all(case.keys() >= {"slowdown", "slowdown_with_search"} for case in result["cases"])


def test_reading(tiny_run: Run) -> None:
    result = last_line("reading.py", "--run", str(tiny_run.root), "--past", "20", "--batch", "1", "2", "--json")
    assert [(case["batch"], case["tokens"]) for case in result["cases"]] == [(1, 1), (1, 8), (2, 1), (2, 8)]
    parts = {"base_ms", "search_ms", "gnn_ms", "mix_ms", "whole_ms", "beside_base"}
    assert all(case.keys() >= parts for case in result["cases"])
    assert "block_of_8" in result["cases"][1]


def test_training(tiny_run: Run) -> None:
    case = {
        "preset": "paper",
        "updates": True,
        "k": 4,
        "blocks": 1,
        "reach": 1,
        "precision": "fp32",
        "checkpoint": True,
    }
    result = last_line("training.py", "--run", str(tiny_run.root), "--child", json.dumps(case))
    assert "step_s" in result
    assert result["bytes"] > 1e6
    assert result["unique_ratio"] >= 1


@pytest.mark.slow
def test_defaults(tiny_run: Run, tmp_path: Path) -> None:
    asked = ["--steps", "3", "--change", "as it is", "--change", "gnn.dropout 0", "--json"]
    asked = ["--run", str(tiny_run.root), "--forks", str(tmp_path / "forks"), *asked]
    result = last_line("defaults.py", *asked)
    assert [case["change"] for case in result["cases"]] == ["as it is", "gnn.dropout 0"]
    assert all(-100 < case[tiny_run.root.name] < 1000 for case in result["cases"])
    made = load_config(tmp_path / "forks" / tiny_run.root.name / "gnn.dropout-0-3")
    assert made.gnn.dropout == 0.0
    assert [phase.steps for phase in made.train.curriculum] == [3]
    assert last_line("defaults.py", *asked)["cases"] == result["cases"]


@pytest.mark.slow
def test_serving(tiny_run: Run) -> None:
    given = ("--run", str(tiny_run.root), "--streams", "4", "--seconds", "1", "--tokens", "8", "--json")
    result = last_line("serving.py", *given)
    assert [case["case"] for case in result["cases"][:2]] == ["1 at once", "4 at once"]
    assert all("tokens_per_second" in case for case in result["cases"][:2])
    assert result["server_errors"] == {}
    assert result["alive"]


@pytest.mark.slow
def test_generation(tiny_run: Run) -> None:
    given = ("--run", str(tiny_run.root), "--prompts", "2", "--tokens", "16", "--batch", "1", "2", "--json")
    result = last_line("generation.py", *given)
    cases = result["cases"]
    assert {(case["domain"], case["batch"]) for case in cases} == {("in", 1), ("in", 2), ("out", 1), ("out", 2)}
    assert all("ratio" in case and case["tokens_per_step"] >= 1 for case in cases)
    assert all("prompt_lookup_ratio" in case for case in cases if case["batch"] == 1)


@pytest.mark.slow
def test_scaling(write_config: Any) -> None:
    """More nodes never search more slowly, and each holds less; sending and merging is counted."""
    config = write_config(index={"kind": "ivf"})
    result = last_line("scaling.py", "--config", str(config), "--cores", "8", "--json")
    for size in ("100M", "768M", "10B"):
        found = [case for case in result["search"] if case["size"] == size]
        assert [case["nodes"] for case in found] == [1, 4, 16, 64]
        assert found[0]["merging"] == 0
        held = [case["index_bytes"] for case in found]
        assert held == sorted(held, reverse=True)
        assert all(case.keys() >= {"queries_per_second", "seconds"} for case in found)


@pytest.mark.slow
def test_own_past(tiny_run: Run) -> None:
    result = last_line("own_past.py", "--run", str(tiny_run.root), "--tokens", "150", "--json")
    assert [(case["tokens"], case["predictor"]) for case in result["cases"]] == [
        (tokens, name) for tokens in ("all", "beyond the window") for name in ("base", "+kNN", "+GNN", "+GNN+kNN")
    ]
    base = [case for case in result["cases"] if case["predictor"] == "base"]
    assert all(case["change"] == pytest.approx(0, abs=1e-6) for case in base)
    assert all(case["low"] <= case["change"] <= case["high"] for case in result["cases"])
    assert any(case["without"] != pytest.approx(case["with"], rel=1e-4) for case in result["cases"])


@pytest.mark.slow
def test_search(tiny_run: Run) -> None:
    """Real states and inflated ones; exact search finds everything, and every index most of it."""
    sizes, kinds = ("1500", "3000"), ("exact", "auto", "PCA16,IVF8,PQ16x4fs")
    given = ("--run", str(tiny_run.root), "--rows", *sizes, "--index", *kinds, "--k", "128", "--tries", "1", "--json")
    cases = last_line("search.py", *given)["cases"]
    assert [(case["rows"], case["index"]) for case in cases] == [(int(n), kind) for n in sizes for kind in kinds]
    assert all(case.keys() >= {"queries_per_s", "queries_per_s_single"} for case in cases)
    assert all(case["bytes_per_vector"] > 0 for case in cases)
    assert all(case["recall_at_1024"] == 1 for case in cases if case["kind"] == "exact")
    assert all(0.5 < case["recall_at_128"] <= 1 for case in cases)


@pytest.mark.slow
def test_living(tiny_run: Run, tmp_path: Path) -> None:
    given = ("--tokens", "300", "--rows", "100000", "--folder", str(tmp_path), "--json")
    result = last_line("living.py", "--run", str(tiny_run.root), *given)
    found = {case["what"]: case for case in result["cases"]}
    assert "ratio" in found["add"]
    assert "documents_per_s" in found["remove"]
    assert "cpu_ratio" in found["the same while a writer works"]
    for share in ("5%", "20%", "50%"):
        masked, compacted = found[f"search, {share} removed"], found[f"search, {share} removed, compacted"]
        assert masked["megabytes"] == found["search, nothing removed"]["megabytes"] > compacted["megabytes"]
    assert "milliseconds" in found["open 100,000 rows: store and index"]


@pytest.mark.slow
def test_facts(tiny_run: Run) -> None:
    """What is learned is forgotten to the last digit, and only what was learned has changed."""
    pytest.importorskip("bm25s", reason="an extra: pip install -c constraints.txt -e '.[passages]'")
    given = ("--facts", "12", "--rare", "10000", "--known", "1", "--others", "30", "--epochs", "1", "--single", "1")
    learners = ("--learners", "book", "passages", "full")
    result = last_line("facts.py", "--run", str(tiny_run.root), *given, *learners, "--json")
    found = {(case["learner"], case["prediction"], case["probe"]): case for case in result["cases"]}
    books = [("open book", name) for name in ("base", "+kNN", "+GNN", "+GNN+kNN")]
    others = [("passages in the context", "base"), ("fine-tuning, all weights", "base")]
    assert list(found) == [(*one, probe) for one in (*books, *others) for probe in ("as written", "other lead-in")]
    assert result["facts"] >= 2
    for case in found.values():
        assert case["difference"] < 1e-6
        assert case["p_low"] <= case["p"]["learned"] <= case["p_high"]
        assert case["others"]["before"] > 1
        assert case["seconds"]
    written = {name: found[learner, name, "as written"]["p"] for learner, name in books}
    assert written["+kNN"]["learned"] > written["+kNN"]["before"]
    assert written["base"]["learned"] == written["base"]["before"]  # the base model learns nothing
    tuned = found["fine-tuning, all weights", "base", "as written"]
    assert tuned["log_p"]["learned"] != tuned["log_p"]["before"]


def test_facts_are_words_of_their_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fact is a word of several tokens, and its prompt is what stands before it in the same sentence."""
    monkeypatch.syspath_prepend(str(FOLDER))
    facts = importlib.import_module("facts")
    text = "The first one ends. In this sentence zebrafish swim\nwith zebrafish.\n\nToo short: zebra"
    ids, offsets = [ord(sign) for sign in text], list(range(len(text)))
    found = [*facts.candidates(3, TokenizedDocument("name", text, ids, offsets))]
    spelled = {fact.word: "".join(map(chr, fact.prompt)) for fact in found}
    assert spelled == {
        "ends": "The first one ",
        "sentence": "In this ",
        "zebrafish": "In this sentence ",
        "swim": "In this sentence zebrafish ",
        "with": "In this sentence zebrafish swim\n",
    }
    assert all("".join(map(chr, fact.answer)) == fact.word and fact.document == 3 for fact in found)
