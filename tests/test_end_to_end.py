"""The whole of it on a random-initialised LM: rows, causality, blocks, the API and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnlm
from gnnlm.book import Book
from gnnlm.errors import CorpusError, GnnlmError
from gnnlm.predict.knn import Mix
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.predict.split_scoring import score_text
from gnnlm.run import Run
from gnnlm.run.stages import STAGES
from tests.cli import gnnlm as command
from tests.cli import gnnlm_cold
from tests.conftest import WriteConfig

FROZEN = [name for name in STAGES if name not in ("lm", "passages")]  # a model used as it came, no comparison


@pytest.fixture(scope="module")
def book(tiny_run: Run) -> Book:
    return gnnlm.open(tiny_run.root)


@pytest.fixture(scope="module")
def text(tiny_run: Run) -> str:
    return str(tiny_run.snapshot.streams["test"].documents[0].text)[:300]


def test_report(tiny_run: Run) -> None:
    report = json.loads((tiny_run.artifact("eval").path / "report.json").read_text())
    assert set(report["rows"]) == set(PREDICTORS)
    assert report["test_tokens"] == tiny_run.snapshot.streams["test"].token_count
    assert report["store_tokens"] == tiny_run.snapshot.streams["train"].token_count
    for row in report["rows"].values():
        assert row["ppl_95"][0] <= row["ppl"] <= row["ppl_95"][1]
        assert row["tokens_per_second"] > 0
    # a random LM over text of twenty-five words: looking up must help, each addition must help
    ppl = {name: report["rows"][name]["ppl"] for name in PREDICTORS}
    assert ppl["knn"] < ppl["base"]
    assert ppl["gnn"] < ppl["base"]
    assert ppl["gnn_knn"] < ppl["gnn"]


def test_saved_scores_are_what_the_book_says(tiny_run: Run, book: Book) -> None:
    stream = tiny_run.snapshot.streams["test"]
    document = stream.documents[0].text
    scores = book.score(document)
    length = int(stream.starts[1]) - 1
    assert "".join(scores.tokens) == document
    for name in PREDICTORS:
        saved = np.load(tiny_run.artifact("eval").path / f"{name}.log_probs.npy")[:length]
        np.testing.assert_allclose(getattr(scores, name), saved, atol=1e-3)
    assert scores.perplexity("base") == pytest.approx(np.exp(-scores.base.mean()))
    assert scores.ids == stream.tokens[:length].tolist()
    assert [document[start:end] for start, end in scores.offsets] == scores.tokens


@pytest.mark.parametrize("place", [0, 40, 100, 299])
def test_nothing_before_a_changed_token_moves(book: Book, text: str, place: int) -> None:
    before = book.score(text)
    changed = text[:place] + ("#" if text[place] != "#" else "+") + text[place + 1 :]
    after = book.score(changed)
    for name in PREDICTORS:
        np.testing.assert_allclose(
            getattr(after, name)[:place], getattr(before, name)[:place], rtol=1e-4, atol=1e-4, err_msg=name
        )
        assert abs(getattr(after, name)[place] - getattr(before, name)[place]) > 1e-6


def test_one_block_equals_many(tiny_run: Run) -> None:
    text, predictor = tiny_run.snapshot.searched("test"), tiny_run.snapshot.predictor
    results = [score_text(predictor, text, size, "score", PREDICTORS)[0] for size in (7, 64, len(text.text))]
    for other in results[1:]:
        for name in PREDICTORS:
            np.testing.assert_allclose(other[name], results[0][name], rtol=1e-4, atol=1e-4)


def test_only_what_is_asked_for_is_computed(tiny_run: Run) -> None:
    text, predictor = tiny_run.snapshot.searched("test"), tiny_run.snapshot.predictor
    whole, _ = score_text(predictor, text, 64, "score", PREDICTORS)
    for name in PREDICTORS:
        alone, _ = score_text(predictor, text, 64, "score", (name,))
        np.testing.assert_allclose(alone[name], whole[name], rtol=1e-5, atol=1e-5)
    _, prediction = next(text.predictions(predictor, 8, ("base",)))
    assert set(prediction.states) == {"base"}
    assert prediction.neighbours.k == 0
    _, prediction = next(text.predictions(predictor, 8, ("gnn",)))
    assert set(prediction.states) == {"gnn"}
    assert prediction.neighbours.k == predictor.graph_k


def test_distributions_sum_to_one_and_agree_with_targets(tiny_run: Run) -> None:
    text, predictor = tiny_run.snapshot.searched("test"), tiny_run.snapshot.predictor
    positions, prediction = next(text.predictions(predictor, 50, PREDICTORS))
    full, tokens = prediction.log_probs(PREDICTORS), text.text.tokens(positions)
    targets = prediction[tokens >= 0].target_log_probs(tokens[tokens >= 0], PREDICTORS)
    for name in PREDICTORS:
        torch.testing.assert_close(full[name].exp().sum(-1), torch.ones(50), rtol=1e-4, atol=1e-4)
        picked = full[name].gather(1, tokens.clamp(min=0)[:, None])[:, 0][tokens >= 0]
        torch.testing.assert_close(picked, targets[name], rtol=1e-4, atol=1e-4)


def test_without_knn_weight_there_is_no_knn_effect(tiny_run: Run) -> None:
    nothing = Mix(k=4, temperature=1.0, weight=0.0)
    predictor = tiny_run.snapshot.predictor_with({"base": nothing, "gnn": nothing})
    scores, _ = score_text(predictor, tiny_run.snapshot.searched("test"), 64, "score", PREDICTORS)
    assert np.array_equal(scores["knn"], scores["base"])
    assert np.array_equal(scores["gnn_knn"], scores["gnn"])


def test_training_tables_never_hold_the_own_document(tiny_run: Run) -> None:
    ids = tiny_run.artifact("search").array("train.ids.npy")
    stream = tiny_run.snapshot.streams["train"]
    own = stream.document_of(np.arange(len(stream)))
    found = stream.document_of(np.maximum(ids, 0))
    assert not ((found == own[:, None]) & (ids >= 0)).any()
    assert (np.asarray(stream.tokens)[ids[ids >= 0]] >= 0).all()  # every row has a token to copy


def test_neighbors(tiny_run: Run, book: Book) -> None:
    train = tiny_run.snapshot.streams["train"].documents[0]
    text = train.text[:60]
    found = book.neighbors(text, k=2)
    assert len(found) == 60
    first = found[30][0]  # the text stands in the store: it finds itself
    assert first.document == train.name
    assert first.similarity == pytest.approx(1, abs=1e-3)
    assert first.token == text[30]
    assert first.before == text[22:30]
    assert first.after == train.text[31:39]
    without = book.neighbors(text, k=2, exclude=[train.name])
    assert all(n.document != train.name for line in without for n in line)
    assert book.neighbors(text, k=2, exclude=train.name) == without
    with pytest.raises(CorpusError, match="no document of the store is named 'nope'"):
        book.neighbors(text, exclude=["nope"])
    with pytest.raises(GnnlmError, match="k must be at least 1"):
        book.neighbors(text, k=0)
    with pytest.raises(CorpusError, match="expected a string, got int"):
        book.score([3])  # type: ignore[list-item]
    with pytest.raises(CorpusError, match="character 2 is half of a surrogate pair"):
        book.score("ab\ud800")
    with pytest.raises(CorpusError, match="nothing to score"):
        book.score("")
    with pytest.raises(GnnlmError):
        gnnlm.open("no/such/run")


def test_command_line(write_config: WriteConfig, tmp_path: Path) -> None:
    config = write_config()
    run = tmp_path / "run"
    for stage in ("corpus", "encode", "index", "search"):
        command(stage, config)
    shown = json.loads(command("status", run, "--json").stdout.splitlines()[-1])
    assert {name: entry["state"] for name, entry in shown.items()} == {
        name: "done" if name in ("corpus", "encode", "index", "search") else "missing" for name in FROZEN
    }
    first = gnnlm_cold("run", config, "--json")
    report: dict[str, Any] = json.loads(first.stdout.splitlines()[-1])
    assert {"rows", "test_tokens", "store_tokens"} <= report.keys()
    assert "+GNN+kNN" in first.stdout
    again = command("run", run, "--json")
    assert again.stderr.count("already done") == len(FROZEN)
    assert json.loads(again.stdout.splitlines()[-1]) == report
    assert json.loads(command("eval", run, "--json").stdout.splitlines()[-1]) == report
    assert any((run / "tensorboard").iterdir())


def test_demo_shows_everything(tiny_values: dict[str, Any], tmp_path: Path) -> None:
    changes = [f"{section}={json.dumps(values)}" for section, values in tiny_values.items()]
    arguments = [part for change in changes for part in ("--set", change)]
    done = command("demo", "--run", tmp_path / "demo", *arguments, "--json")
    assert done.stdout.count("Input: ") == 1
    assert done.stdout.count("Extracted ") >= 2
    assert "its interval" in done.stdout
    assert f"{tmp_path / 'demo' / 'report' / 'report.md'}" in done.stdout
    *lines, _ = done.stdout.splitlines()
    assert sum(max(1, -(-len(line) // 100)) for line in lines) <= 45, "one screen"
    assert "Next, use your own text" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["rows"]["gnn_knn"]["ppl"] > 1


@pytest.mark.parametrize("kind", [{"kind": "ivf"}, {"kind": "IVF8,PQ4x4", "metric": "l2"}])
def test_other_indexes(tiny_run: Run, tmp_path: Path, kind: dict[str, str]) -> None:
    from gnnlm.config import parse_config

    values = {**tiny_run.config.model_dump(mode="json"), "run": str(tmp_path / "run")}
    values["index"] = {**kind, "probes": 4}
    values["train"]["curriculum"] = [{"k": 4, "steps": 2}]
    run = Run(parse_config(values))
    run.build_all()
    report = json.loads((run.artifact("eval").path / "report.json").read_text())
    assert report["rows"]["knn"]["ppl"] <= report["rows"]["base"]["ppl"] * 1.05
    assert report["rows"]["gnn"]["ppl"] < report["rows"]["base"]["ppl"]


@pytest.fixture(scope="module")
def coded_run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run again, with neighbour states of eight bytes and a cache of codes."""
    path = tmp_path_factory.mktemp("runs") / "pq"
    changes = ("codec.kind=pq", "codec.bytes=8", "codec.train_rows=2000", "cache.form=states", "cache.dtype=pq")
    flags = [part for change in (*changes, "cache.bytes=8") for part in ("--set", change)]
    assert "kept corpus, encode, index, search" in command("fork", tiny_run.root, path, *flags).stderr
    command("run", path)
    return path


def test_a_quantized_run(tiny_run: Run, coded_run: Path) -> None:
    """Coding costs something, and looking up still helps."""
    exact, coded = (json.loads((root / "report" / "report.json").read_text()) for root in (tiny_run.root, coded_run))
    assert coded["codec"]["kind"] == "pq"
    assert coded["codec"]["compression"] == 16
    assert 0 < coded["codec"]["error"] < 0.5
    assert coded["rows"]["base"]["ppl"] == exact["rows"]["base"]["ppl"]  # context nodes are exact
    assert coded["rows"]["knn"]["ppl"] == exact["rows"]["knn"]["ppl"]
    assert coded["rows"]["gnn"]["ppl"] != exact["rows"]["gnn"]["ppl"]
    assert coded["rows"]["gnn"]["ppl"] < exact["rows"]["base"]["ppl"]


def test_compare(tiny_run: Run, coded_run: Path) -> None:
    done = command("compare", tiny_run.root, coded_run)
    assert "pq, 8 bytes" in done.stdout
    assert "16x" in done.stdout
    assert "different test text" not in done.stdout


def test_fork_refuses_a_directory_in_use(tiny_run: Run, coded_run: Path) -> None:
    assert "already exists" in command("fork", tiny_run.root, coded_run, code=1).stderr


def test_a_stale_cache_is_refused(tiny_run: Run, tmp_path: Path) -> None:
    """Other weights, then another store: what was kept of the old ones is not read."""
    forked = Run(tiny_run.config.model_copy(update={"run": str(tmp_path / "fork")}))
    assert tiny_run.fork(forked.config) == FROZEN
    assert forked.snapshot.predictor.cache is not None
    train = forked.config.train.model_copy(update={"lr": 2e-3})
    other = Run(forked.config.model_copy(update={"train": train}))
    other.build("train", rebuild=True)
    with pytest.raises(GnnlmError, match="cache was made from other inputs: artifact train"):
        other.artifact("cache")
    with pytest.raises(GnnlmError, match="cache was made from other inputs"):
        other.build("tune")
    quantized = forked.config.codec.model_copy(update={"kind": "pq", "bytes": 8, "train_rows": 2000})
    other = Run(forked.config.model_copy(update={"codec": quantized}))
    other.build("codec", rebuild=True)
    other.build("train", rebuild=True)
    with pytest.raises(GnnlmError, match="cache was made from other inputs"):
        other.build("cache")


def test_the_cache_changes_nothing(tiny_run: Run) -> None:
    """With and without: half precision is all that differs."""
    text, cached = tiny_run.snapshot.searched("test"), tiny_run.snapshot.predictor
    assert cached.cache is not None
    live = replace(cached, cache=None)
    blocks = (text.predictions(predictor, 64, ("gnn",)) for predictor in (cached, live))
    for (_, a), (_, b) in zip(*blocks, strict=True):
        torch.testing.assert_close(a.states["gnn"], b.states["gnn"], rtol=5e-3, atol=5e-3)
