"""Base models trained from scratch and fine-tuned: data order, resume, and whole runs on them."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import gnnlm
from gnnlm.config import parse_config
from gnnlm.errors import ConfigError, GnnlmError
from gnnlm.evaluate.ngram import score_ngram
from gnnlm.lm.architecture import warn_of_positions
from gnnlm.predict.split_scoring import score_text
from gnnlm.retrieval.index import keys_of
from gnnlm.run import Run
from gnnlm.train import training_loop as fit_module
from gnnlm.train.batches import IGNORED, Lanes, StartToken, TextBlocks, TextPieces
from gnnlm.train.train_lm import LMTask
from tests.cli import gnnlm_killed
from tests.conftest import TINY, merge

TEXT = np.arange(100, dtype=np.int64)


def test_blocks_of_a_text_predict_what_follows() -> None:
    read, wanted = TextBlocks(TEXT, start=100, block=8, batch=3, seed=0)(4)
    assert read.shape == wanted.shape == (3, 8)
    assert torch.equal(read[:, 1:], wanted[:, :-1])
    assert all(int(w[0]) == (int(r[0]) + 1) % 101 for r, w in zip(read, wanted, strict=True))


def test_lanes_go_on_where_they_stopped() -> None:
    lanes = Lanes(TEXT, start=100, segment=8, lanes=3)
    first, second = lanes(0), lanes(1)
    assert torch.equal(first[1][:, -1], second[0][:, 0])
    assert [int(x) for x in first[0][:, 0]] == [100, 32, 65]
    assert [lanes.begins(number) for number in range(5)] == [True, False, False, False, True]
    assert len(lanes) == 4


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(2, 16), st.integers(1, 60), st.booleans())
def test_pieces_cover_every_token_once(lengths: list[int], block: int, budget: int, always: bool) -> None:
    texts = [np.arange(n, dtype=np.int64) + 1000 * (i + 1) for i, n in enumerate(lengths)]
    ends = np.cumsum(lengths)
    bounds = np.stack([ends - lengths, ends], axis=1)
    pieces = TextPieces(np.concatenate(texts), bounds, StartToken(7, always), block, budget, seed=1)
    seen: list[int] = []
    for number in range(pieces.batches_in(0)):
        read, wanted = pieces(number)
        assert len(read) == 1 or read.numel() <= max(budget, block)
        for r, w in zip(read.tolist(), wanted.tolist(), strict=True):
            real = [x for x in w if x != IGNORED]
            seen += real
            assert r[1 : len(real)] == real[:-1]
            assert r[0] == (7 if always or real[0] % 1000 == 0 else real[0] - 1)
    assert sorted(seen) == sorted(t for text in texts for t in text.tolist())
    assert pieces.tokens == len(seen)
    later = pieces.batches_in(0) + pieces.batches_in(1)
    again = TextPieces(np.concatenate(texts), bounds, StartToken(7, always), block, budget, seed=1)
    assert torch.equal(pieces(later)[1], again(later)[1])  # the third epoch, whether or not one has been through two


SCRATCH: dict[str, Any] = {
    "corpus": {"tokens": "words", "valid_share": 0.2, "test_share": 0.2},
    "lm": {
        "model": "scratch",
        "device": "cpu",
        "continuous": True,
        "whole_lines": True,
        "window": 48,
        "context": 16,
        "architecture": {"width": 32, "layers": 2, "heads": 4, "ffn": 64, "cutoffs": [8], "factor": 2, "dropout": 0.1},
        "train": {
            "steps": 60,
            "block": 24,
            "batch_tokens": 192,
            "accumulate": 2,
            "lr": 3e-3,
            "warmup": 5,
            "validate_every": 20,
            "valid_tokens": 300,
        },
    },
    "search": {"exclude": "receptive-field"},
}
CASES: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "sentences": {
        "lm": {"continuous": False, "train": {"optimizer": "nesterov", "lr": 0.1, "schedule": "inverse-sqrt"}}
    },
    "transformer-xl": {
        "corpus": {"tokens": "bytes"},
        "lm": {
            "whole_lines": False,
            "architecture": {"preset": "enwik8", "segment": 12, "memory": 12, "cutoffs": [], "factor": 1},
        },
        "store": {"key": "ffn_input"},
    },
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with some order in it: a word is mostly followed by the same word."""
    folder = tmp_path_factory.mktemp("lines")
    rng, words = random.Random(0), [f"w{n}" for n in range(20)]
    for number in range(12):
        at, text = 0, []
        for _ in range(20):
            line = []
            for _ in range(rng.randint(4, 9)):
                at = (at + 1) % 20 if rng.random() < 0.8 else rng.randrange(20)
                line.append(words[at])
            text.append(" ".join(line))
        (folder / f"{number}.txt").write_text("\n".join(text))
    return folder


def scratch_config(lines: Path, run: Path, case: str) -> Any:
    values = merge(merge(TINY, SCRATCH), CASES[case])
    return parse_config(merge(values, {"run": str(run), "corpus": {"source": str(lines)}}))


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_run_on_a_model_from_scratch(case: str, lines: Path, tmp_path: Path) -> None:
    run = Run(scratch_config(lines, tmp_path / "run", case))
    report = json.loads((run.build_all().path / "report.json").read_text())
    history = json.loads((run.artifact("lm").path / "history.json").read_text())
    assert history[-1]["valid_base"] < history[0]["valid_base"] - 0.3
    rows = {name: row["ppl"] for name, row in report["rows"].items()}
    assert rows["knn"] < rows["base"]  # text that repeats itself: looking up helps
    assert rows["gnn"] < rows["base"] * 1.001
    assert rows["gnn_knn"] < rows["base"]
    assert report["lm"]["kind"] == "scratch"
    found = score_ngram(run.snapshot.streams, run.config.lm.continuous, run.artifact("corpus").facts)
    assert found.test_tokens == report["test_tokens"]
    book = gnnlm.open(tmp_path / "run")
    text = "w1 w2 w3 w4"
    scores = book.score(text)
    assert len(scores.tokens) == (5 if case != "transformer-xl" else len(text))
    assert book.neighbors(text, k=2)[0]
    lm = gnnlm.load_lm(tmp_path / "run" / "lm")
    tokens = torch.tensor([run.snapshot.lm.tokenize(text)[0]])
    torch.testing.assert_close(lm.log_probs(lm.encode(tokens)).exp().sum(-1), torch.ones(tokens.shape))
    if case == "transformer-xl":
        keys = keys_of(run.artifact("encode"), "train")
        assert keys.shape == (len(run.snapshot.streams["train"]), 32)


def tree(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.name != "manifest.json"}


@pytest.mark.parametrize("case", ["adaptive", "transformer-xl"])
def test_training_a_base_model_survives_a_kill(case: str, lines: Path, tmp_path: Path) -> None:
    """Killed after a checkpoint, it ends in the same bytes: weights, optimizer, memory and data order go on."""
    whole = Run(scratch_config(lines, tmp_path / "whole", case))
    whole.build("corpus")
    whole.build("lm")
    config = tmp_path / "c.yaml"
    values = scratch_config(lines, tmp_path / "cut", case).model_dump(mode="json")
    config.write_text(yaml.safe_dump(values))
    gnnlm_killed("lm", "train", config, journal=tmp_path / "cut" / ".lm.partial" / "journal.json", step=2)
    assert not (tmp_path / "cut" / "lm").exists()
    cut = Run(parse_config(values))
    made = cut.build("lm")
    assert tree(made.path) == tree(whole.artifact("lm").path)


FINETUNE = {
    "kind": "full",
    "epochs": 3,
    "block": 48,
    "batch_tokens": 192,
    "lr": 2e-3,
    "warmup": 2,
    "validate_every": 8,
    "valid_tokens": 400,
    "unread": "held-out",
    "held_out": 0.3,
    "rank": 4,
}


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_fine_tuning_as_a_stage(kind: str, tiny_lm_dir: Path, text_dir: Path, tiny_run: Run, tmp_path: Path) -> None:
    if kind == "lora":
        pytest.importorskip("peft")
    values = merge(TINY, {"corpus": {"source": str(text_dir)}, "lm": {"model": str(tiny_lm_dir), "device": "cpu"}})
    values = merge(values, {"run": str(tmp_path / "run"), "lm": {"finetune": {**FINETUNE, "kind": kind}}})
    run = Run(parse_config(values))
    report = json.loads((run.build_all().path / "report.json").read_text())
    frozen = json.loads((tiny_run.artifact("eval").path / "report.json").read_text())
    assert report["rows"]["base"]["ppl"] < 0.8 * frozen["rows"]["base"]["ppl"]
    facts = run.artifact("lm").facts
    assert facts["kind"] == kind
    assert 0 < len(facts["unread"]) < facts_documents(run)
    allowed = run.snapshot.unread_positions
    assert allowed is not None
    assert set(run.snapshot.streams["train"].document_of(allowed).tolist()) == set(facts["unread"])
    learned_on = run.snapshot.searched("train").table.positions(torch.arange(len(allowed)))
    assert learned_on.tolist() == allowed.tolist()
    if kind == "lora":
        assert facts["trained"] < facts["parameters"] / 3


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_first_readings_are_the_states_before_learning(
    dropout: float, tiny_lm_dir: Path, text_dir: Path, tmp_path: Path
) -> None:
    """With a rate of nothing the model never learns, so what it kept is what it thinks of each piece by itself."""
    model = tmp_path / "model"
    shutil.copytree(tiny_lm_dir, model)
    settings = json.loads((model / "config.json").read_text())
    assert "attention_dropout" in settings
    (model / "config.json").write_text(json.dumps({**settings, "attention_dropout": dropout}))
    values = merge(TINY, {"corpus": {"source": str(text_dir)}, "lm": {"model": str(model), "device": "cpu"}})
    tuning = {**FINETUNE, "unread": "first-reading", "settle": 0.25, "epochs": 1.5, "lr": 1e-12}
    run = Run(parse_config(merge(values, {"run": str(tmp_path / "run"), "lm": {"finetune": tuning}})))
    run.build("corpus")
    made = run.build("lm")
    stream, positions, states = run.snapshot.streams["train"], run.snapshot.unread_positions, run.snapshot.unread_states
    assert positions is not None
    assert states is not None
    assert 0.5 * stream.token_count < len(positions) < stream.token_count
    assert made.facts["unread"] == []
    assert made.facts["first_reading"]["count"] == len(positions)
    kept = np.zeros(len(stream), dtype=bool)
    kept[positions] = True
    assert not np.asarray(states)[~kept].any()
    for begin, end in itertools.pairwise(stream.starts.tolist()):
        for at in range(begin, end - 1, FINETUNE["block"]):
            tokens = np.asarray(stream.tokens[at : min(at + FINETUNE["block"], end - 1)], dtype=np.int64)
            assert kept[at : at + len(tokens)].all() or not kept[at : at + len(tokens)].any()
            read = torch.from_numpy(np.concatenate([[run.snapshot.lm.start_token], tokens[:-1]]))
            if kept[at]:
                wanted = run.snapshot.lm.encode(read[None])[0].numpy()
                np.testing.assert_allclose(states[at : at + len(tokens)], wanted, atol=2e-2)
    for stage in ("encode", "codec", "index", "search"):
        run.build(stage)
    train, some = run.snapshot.searched("train"), torch.from_numpy(positions[:5])
    context, found = train.context(some[None]), train.table.at(some)
    torch.testing.assert_close(context.states_BTD[0], torch.from_numpy(np.asarray(states[positions[:5]])).float())
    assert (train.text.document_of(found.positions) != train.text.document_of(some)[:, None]).all()
    left_out = torch.from_numpy(np.flatnonzero(~kept)[:3])
    assert (train.table.at(left_out).positions == -1).all()  # by position, not by line
    for stage in ("train", "cache", "tune"):
        run.build(stage)
    predictor, wanted = run.snapshot.predictor, ("base", "gnn")
    whole, _ = score_text(predictor, train, 512, "score", wanted, torch.from_numpy(positions))
    for block in (7, 64):  # a text with gaps scores the same however it is cut
        parts, _ = score_text(predictor, train, block, "score", wanted, torch.from_numpy(positions))
        for name in wanted:
            np.testing.assert_allclose(parts[name], whole[name], rtol=1e-3, atol=1e-3)


def test_first_readings_survive_a_kill(tiny_lm_dir: Path, text_dir: Path, tmp_path: Path) -> None:
    values = merge(TINY, {"corpus": {"source": str(text_dir)}, "lm": {"model": str(tiny_lm_dir), "device": "cpu"}})
    values = merge(values, {"lm": {"finetune": {**FINETUNE, "unread": "first-reading", "validate_every": 2}}})
    whole = Run(parse_config(merge(values, {"run": str(tmp_path / "whole")})))
    whole.build("corpus")
    made = whole.build("lm")
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump(merge(values, {"run": str(tmp_path / "cut")})))
    gnnlm_killed("lm", "finetune", config, journal=tmp_path / "cut" / ".lm.partial" / "journal.json", step=2)
    cut = Run(parse_config(merge(values, {"run": str(tmp_path / "cut")}))).build("lm")
    assert tree(cut.path) == tree(made.path)


@pytest.mark.parametrize(
    ("case", "window", "told"),
    [("adaptive", 48, True), ("adaptive", 24, False), ("transformer-xl", 48, False)],
)
def test_positions_that_were_never_trained_are_told(
    case: str, window: int, told: bool, lines: Path, tmp_path: Path, logged: Callable[[], str]
) -> None:
    config = scratch_config(lines, tmp_path, case).lm
    warn_of_positions(config.model_copy(update={"window": window}))
    assert ("longer than lm.train.block" in logged()) == told


@pytest.mark.parametrize("case", ["adaptive", "transformer-xl"])
def test_checkpoints_between_validations(
    case: str, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    """Where validations are far apart, time makes checkpoints, and what goes on from one ends the same."""
    whole = Run(scratch_config(lines, tmp_path / "whole", case))
    whole.build("corpus")
    made = whole.build("lm")
    monkeypatch.setattr(fit_module, "CHECKPOINT_SECONDS", -1.0)
    loss = LMTask.loss

    def cut_off(self: LMTask, step: int, part: int) -> Any:
        if step == 27:
            raise KeyboardInterrupt
        return loss(self, step, part)

    cut = Run(scratch_config(lines, tmp_path / "cut", case))
    cut.build("corpus")
    monkeypatch.setattr(LMTask, "loss", cut_off)
    with pytest.raises(KeyboardInterrupt):
        cut.build("lm")
    monkeypatch.setattr(LMTask, "loss", loss)
    again = Run(scratch_config(lines, tmp_path / "cut", case)).build("lm")
    assert "resuming from step 27" in logged()
    assert tree(again.path) == tree(made.path)


def facts_documents(run: Run) -> int:
    return int(run.artifact("corpus").facts["train"]["documents"])


def test_what_cannot_be_trained_is_told(tmp_path: Path, text_dir: Path, tiny_run: Run) -> None:
    for values, words in [
        ({"lm": {"model": "scratch"}}, "set corpus.tokens to words or bytes"),
        ({"corpus": {"tokens": "words"}}, "is for lm.model scratch"),
        ({"lm": {"model": "scratch", "finetune": {"kind": "full"}}}, "finetune is for a pretrained model"),
        ({"lm": {"finetune": {"unread": "first-reading", "epochs": 0.1}}}, "settle must be less than epochs"),
        (
            {"lm": {"finetune": {"kind": "full", "unread": "first-reading"}}, "store": {"key": "ffn_input"}},
            r"store\.key must be state",
        ),
    ]:
        with pytest.raises(ConfigError, match=words):
            parse_config({"run": "r", **values})
    with pytest.raises(ConfigError, match="uses its base model without training"):
        tiny_run.build("lm")
    values = merge(TINY, {"run": str(tmp_path / "r"), "corpus": {"source": str(text_dir), "tokens": "words"}})
    wrong = merge(values, {"lm": {"model": "scratch", "architecture": {"memory": 3}}})
    made = Run(parse_config(wrong))
    made.build("corpus")
    with pytest.raises(GnnlmError, match=r"lm\.architecture\.memory is not a field of preset wikitext103"):
        made.build("lm")
