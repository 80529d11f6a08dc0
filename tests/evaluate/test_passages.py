"""Reading with passages against a loop over positions; what a prediction may depend on; the rows of the report."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnlm.artifact import read_manifest
from gnnlm.config import Config, parse_config
from gnnlm.datastore.encode import encode_windows, texts_of
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.evaluate import context_retrieval as module
from gnnlm.evaluate.context_retrieval import (
    Setting,
    first_positions,
    first_settings,
    other_queries,
    other_strides,
    passage_jobs,
)
from gnnlm.evaluate.passage_rows import LATER
from gnnlm.evaluate.report import read_report
from gnnlm.evaluate.report_tables import markdown
from gnnlm.predict.knn import Mix, knn_target_log_probs, mix_log_probs
from gnnlm.predict.predictor import PREDICTORS
from gnnlm.retrieval.bm25 import PassageIndex
from gnnlm.run import Run
from gnnlm.run.planning import model_sizes, sizes_of_text
from tests.cli import error_line, gnnlm
from tests.plan.test_plan import HERE, at_speed, planned
from tests.reference.bm25 import bm25_score

ASKED = {
    "enabled": True,
    "counts": [1, 2],
    "lengths": [4, 8],
    "strides": [4, 8],
    "queries": [5, 9],
    "tune_tokens": 150,
    "tokens": 900,
}
SETTING, WINDOW = Setting(2, 8, 5, 4), 48


def with_passages(config: Config, root: Path, **changes: Any) -> Config:
    values = config.model_dump(mode="json")
    values["eval"]["context_retrieval"] = {**ASKED, **changes}
    return parse_config({**values, "run": str(root)})


@pytest.fixture(scope="module")
def compared(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny run with the comparison switched on."""
    root = Path(shutil.copytree(tiny_run.root, tmp_path_factory.mktemp("passages") / "run"))
    run = Run(with_passages(tiny_run.config, root))
    run.build_all(rebuild=True)
    return run


@pytest.fixture(scope="module")
def document(tiny_run: Run) -> np.ndarray:
    tokens, _ = next(iter(texts_of(tiny_run.snapshot.streams["test"], False)))
    return tokens[:150]


@pytest.fixture(scope="module")
def index(tiny_run: Run) -> PassageIndex:
    return PassageIndex.over(tiny_run.snapshot.streams["train"], SETTING.length)


@pytest.fixture(scope="module")
def states(tiny_run: Run) -> Callable[..., np.ndarray]:
    """The states of a text read with passages, in the batches of the stage."""
    lm = tiny_run.snapshot.lm

    def read(tokens: np.ndarray, index: PassageIndex, setting: Setting = SETTING) -> np.ndarray:
        places = np.arange(len(tokens) + 1)
        jobs = list(passage_jobs(tokens, places, index, setting, lm.start_token, WINDOW))
        assert max(len(job.tokens) for job in jobs) <= WINDOW
        return encode_windows(lm, jobs, 256, "state").states

    return read


def test_states_are_those_of_a_loop(
    tiny_run: Run, document: np.ndarray, index: PassageIndex, states: Callable[..., np.ndarray]
) -> None:
    """One window for each position, nothing batched or shared; the lookup by a loop over passages."""
    lm, passages = tiny_run.snapshot.lm, [passage.tolist() for passage in index.passages]
    found = states(document, index)
    for offset in range(0, 151, 3):
        begin = offset - offset % SETTING.stride
        query = document[max(0, begin - SETTING.query) : begin].tolist()
        scores = [round(bm25_score(passages, number, query), 9) for number in range(len(passages))]
        best = sorted((number for number in range(len(passages)) if scores[number] > 0), key=lambda n: -scores[n])
        before = [token for number in reversed(best[: SETTING.count]) for token in passages[number]]
        first = max(0, begin + SETTING.stride + len(before) - WINDOW)
        read = [lm.start_token, *before, *document[first:offset].tolist()]
        one = lm.encode(torch.tensor([read]))[0, -1].numpy()
        np.testing.assert_allclose(found[offset], one, rtol=1e-3, atol=1e-3, err_msg=str(offset))


def test_lookups_that_find_the_same_are_read_once(
    tiny_run: Run, document: np.ndarray, states: Callable[..., np.ndarray]
) -> None:
    one = PassageIndex([np.arange(1, 9)])  # nothing else can be found
    short, places = np.concatenate([np.arange(1, 9), document[:16]]), np.arange(25)
    jobs = list(passage_jobs(short, places, one, Setting(1, 8, 100, 4), 0, WINDOW))
    assert [job.window.first for job in jobs] == [0, 4]  # without the passage; with it, to the end
    apart = list(passage_jobs(short, places, one, Setting(1, 8, 100, 4), 0, 8 + 1 + 4 + 4))
    assert len(apart) > 4  # the window is full: each stride sees another part of the text


@pytest.mark.parametrize("place", [0, 7, 8, 60, 149])
def test_nothing_before_a_changed_token_moves(
    document: np.ndarray, index: PassageIndex, states: Callable[..., np.ndarray], place: int
) -> None:
    changed = document.copy()
    changed[place] = 9
    before, after = states(document, index), states(changed, index)
    np.testing.assert_allclose(after[: place + 1], before[: place + 1], rtol=1e-4, atol=1e-4)
    assert np.abs(after[place + 1] - before[place + 1]).max() > 1e-3
    np.testing.assert_allclose(states(document[:place], index), before[: place + 1], rtol=1e-4, atol=1e-4)


def test_passages_are_read(document: np.ndarray, index: PassageIndex, states: Callable[..., np.ndarray]) -> None:
    found = states(document, index)
    place = 40  # the first token of a stride
    chosen = index.find(document[place - SETTING.query : place], SETTING.count)
    assert len(chosen) == SETTING.count
    for number in chosen:
        other = PassageIndex(index.passages)
        other.passages = [*index.passages]
        other.passages[number] = np.roll(index.passages[number], 1)  # found as before, but reads differently
        assert np.abs(states(document, other)[place] - found[place]).max() > 1e-3
    none = states(document, PassageIndex([]))
    stride = SETTING.stride
    np.testing.assert_allclose(found[:stride], none[:stride], rtol=1e-4, atol=1e-4)  # nothing read, nothing looked up
    assert np.abs(found[stride:] - none[stride:]).max(1).min() > 1e-4


def test_without_passages_it_is_the_base_model(
    tiny_run: Run, document: np.ndarray, states: Callable[..., np.ndarray]
) -> None:
    """An empty store; the text fits into the window, so that nothing is cut off."""
    few = document[:40]
    read = torch.from_numpy(np.concatenate([[tiny_run.snapshot.lm.start_token], few]))
    base = tiny_run.snapshot.lm.encode(read[None])[0].numpy()
    np.testing.assert_allclose(states(few, PassageIndex([])), base, rtol=1e-4, atol=1e-4)


def test_the_settings_that_are_tried(tiny_run: Run) -> None:
    wanted = with_passages(tiny_run.config, Path("x")).eval.context_retrieval
    pairs = ((1, 4), (1, 8), (2, 4), (2, 8))
    assert first_settings(wanted) == [Setting(count, length, 5, 8) for count, length in pairs]
    assert other_queries(Setting(2, 4, 5, 8), wanted) == [Setting(2, 4, 9, 8)]
    assert other_strides(Setting(2, 4, 9, 8), wanted) == [Setting(2, 4, 9, 4)]


def test_the_artifact(compared: Run) -> None:
    """Number, length and stride are the best tried; the states are those of the positions asked for."""
    made = compared.artifact("passages")
    facts, stream = made.facts, compared.snapshot.streams["test"]
    assert facts["positions"]["test"] == first_positions(stream, 900) < len(stream)
    assert (np.asarray(stream.tokens[: facts["positions"]["test"]]) >= 0).sum() == 900
    best = min(facts["tried"], key=lambda one: one["loss"])
    setting = Setting(*(best[key] for key in ("count", "length", "query", "stride")))
    assert setting == Setting(*(facts[key] for key in ("count", "length", "query", "stride")))
    assert len(facts["tried"]) == 6
    assert sorted(made.manifest.files) == sorted(["test.states.npy", f"{facts['valid']}.states.npy"])
    reader = module.PassageReader(None, compared.snapshot.lm, compared.snapshot.streams["train"], compared.config)  # type: ignore[arg-type]
    jobs = list(reader.jobs(stream, facts["positions"]["test"], setting))
    assert facts["tokens_read"] == sum(len(job.tokens) for job in jobs) / facts["positions"]["test"] > 2
    expected = encode_windows(compared.snapshot.lm, jobs, 256, "state").states
    np.testing.assert_allclose(made.array("test.states.npy"), expected, rtol=5e-3, atol=5e-3)
    head, valid = compared.snapshot.head, compared.snapshot.streams["valid"]
    states = torch.from_numpy(np.array(made.array(f"{facts['valid']}.states.npy"))).float()
    targets = torch.from_numpy(np.array(valid.tokens[: len(states)]).astype(np.int64))
    real = targets >= 0
    loss = -head.target_log_probs(states[real], targets[real]).mean().item()
    assert loss == pytest.approx(best["loss"], rel=1e-5)


def test_only_the_report_is_made_again(compared: Run, tiny_run: Run) -> None:
    for name in tiny_run.stages:
        same = read_manifest(compared.path(name)).files == read_manifest(tiny_run.path(name)).files
        assert same == (name != "eval")
    off = Run(tiny_run.config.model_copy(update={"run": str(compared.root)}))
    assert {name for name, stage in off.stages.items() if off.state(stage) != "done"} == {"eval"}
    other = Run(with_passages(tiny_run.config, compared.root, queries=[6]))
    assert {name for name, stage in other.stages.items() if other.state(stage) != "done"} == {"passages", "eval"}
    stage = other.stages["passages"]
    assert other.why(stage, other.state(stage)) == "eval.context_retrieval.queries was [5, 9], is now [6]"


def test_rows_of_the_report(compared: Run, tiny_run: Run) -> None:
    artifact = compared.artifact("eval")
    report, plain = read_report(artifact), read_report(tiny_run.artifact("eval"))
    assert plain.passages is None
    assert {name: row.ppl for name, row in report.rows.items()} == {name: row.ppl for name, row in plain.rows.items()}
    found = report.passages
    assert found is not None
    named = [*PREDICTORS, "passages", *(f"passages_{name}" for name in PREDICTORS[1:])]
    assert list(found.rows) == named
    assert (found.tokens, found.valid_tokens) == (900, 150)
    document = tiny_run.snapshot.streams["test"].document_of(
        np.flatnonzero(np.asarray(tiny_run.snapshot.streams["test"].tokens) >= 0)[:900]
    )
    assert found.documents == len(set(document.tolist()))
    offset = np.array([list(document[:i]).count(number) for i, number in enumerate(document)])
    assert found.later_tokens == int((offset >= LATER).sum()) > 0
    base = artifact.array("base.log_probs.npy")[:900].astype(np.float64)
    for name, row in found.rows.items():
        scores = artifact.array(f"{name}.log_probs.npy")[:900].astype(np.float64)
        assert row.ppl == pytest.approx(np.exp(-scores.mean()), rel=1e-5)
        assert row.ppl_later == pytest.approx(np.exp(-scores[offset >= LATER].mean()), rel=1e-5)
        assert row.change == pytest.approx(np.exp(base.mean() - scores.mean()) - 1, abs=1e-5)
        assert row.tokens_per_second > 0
        assert (row.ppl_own_mix is not None) == (name in ("passages_knn", "passages_gnn_knn"))
    facts, text = compared.artifact("passages").facts, compared.snapshot.streams["test"]
    states = torch.from_numpy(np.array(compared.artifact("passages").array("test.states.npy"))).float()
    targets = torch.from_numpy(np.array(text.tokens[: len(states)]).astype(np.int64))
    scores = compared.snapshot.head.target_log_probs(states[targets >= 0], targets[targets >= 0])
    assert found.rows["passages"].ppl == pytest.approx(np.exp(-scores.double().mean().item()), rel=1e-4)
    real = targets >= 0
    near = compared.snapshot.index.search(states[real], compared.config.search.k)
    for mixes, expected in (
        (report.mix, found.rows["passages_knn"].ppl),
        (found.mix, found.rows["passages_knn"].ppl_own_mix),
    ):
        mix = Mix.of(mixes["base"])
        tokens = compared.snapshot.store.tokens(near.positions)
        weights = mix.neighbour_weights(near.similarity)
        knn = knn_target_log_probs(tokens, weights, targets[real])
        starts = torch.from_numpy(np.array(text.starts, dtype=np.int64))
        offsets = (
            torch.arange(len(states)) - starts[torch.searchsorted(starts, torch.arange(len(states)), right=True) - 1]
        )
        sure = compared.snapshot.head.confidence(states[real])
        evidence = mix.evidence(tokens, near.similarity, weights, offsets[real], sure)
        mixed = mix_log_probs(scores, knn, mix.weight_of(evidence))
        assert expected == pytest.approx(np.exp(-mixed.double().mean().item()), rel=1e-4)
    assert found.rows["passages"].tokens_per_second < 900 / facts["seconds"]
    assert found.rows["passages_knn"].ppl != found.rows["passages"].ppl
    assert read_report(artifact) == report
    assert json.loads((artifact.path / "report.json").read_text())["passages"]["stride"] == facts["stride"]


def test_the_report_can_be_read(compared: Run) -> None:
    report = read_report(compared.artifact("eval"))
    text = markdown(report)
    assert "the first 900 test tokens" in text
    shown = gnnlm("eval", compared.root).stdout
    for label in ("passages", "passages +kNN", "passages +GNN", "passages +GNN+kNN"):
        assert f"| {label} |" in text
        assert f"\n{label}  " in shown
    for words in (
        "by BM25",
        " tokens for each token of the text.",
        "Chosen on 150 tokens of valid",
        "chosen for them on these tokens of valid: passages +kNN ",
    ):
        assert words in text
        assert words in shown
    assert report.passages is not None
    short = report.passages.model_copy(update={"later_tokens": 0})
    assert "| - | - |" in markdown(report.model_copy(update={"passages": short}))


def test_an_interrupted_build_ends_in_the_same_bytes(
    compared: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(shutil.copytree(compared.root, tmp_path / "run"))
    run, calls = Run(with_passages(compared.config, root)), 0
    shutil.rmtree(root / "passages")
    real = encode_windows

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 9, 14):
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, "encode_windows", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run.build("passages")
        assert run.state(run.stages["passages"]) == "half-done"
    made = run.build("passages")
    assert calls > 14
    assert made.facts["tokens_read"] == compared.artifact("passages").facts["tokens_read"]
    for name in compared.artifact("passages").manifest.files:
        assert (made.path / name).read_bytes() == (compared.artifact("passages").path / name).read_bytes()


def test_keys_of_another_layer(compared: Run, tmp_path: Path) -> None:
    """Where the store is searched by the last feed-forward's input, so is the text read with passages."""
    values = with_passages(compared.config, tmp_path / "run", counts=[1], lengths=[8], strides=[8]).model_dump()
    values["store"]["key"] = "ffn_input"
    values["gnn"]["layers"] = 0
    run = Run(parse_config(values))
    report = read_report(run.build_all())
    assert report.passages is not None
    assert list(report.passages.rows) == ["base", "knn", "passages", "passages_knn"]
    assert "test.keys.npy" in run.artifact("passages").manifest.files


def test_a_run_that_reads_on_from_document_to_document(compared: Run, tmp_path: Path) -> None:
    values = with_passages(compared.config, tmp_path / "run", counts=[1], lengths=[8], strides=[8]).model_dump()
    values["lm"]["continuous"] = True
    values["gnn"]["layers"] = 0
    run = Run(parse_config(values))
    found = read_report(run.build_all()).passages
    assert found is not None
    assert found.tokens == 900
    made, stream = run.artifact("passages"), run.snapshot.streams["test"]
    end = int(stream.starts[1]) - 1
    states = made.array("test.states.npy")
    np.testing.assert_array_equal(states[end], states[end + 1])  # both have read everything before them


def test_what_is_refused(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="this run does not compare with passages; set eval"):
        tiny_run.build("passages")
    root = Path(shutil.copytree(tiny_run.root, tmp_path / "run"))
    config = with_passages(tiny_run.config, root)
    with pytest.raises(ArtifactError, match=r"report was made without the passages stage; gnnlm run .* --rebuild"):
        Run(config).build_all()
    assert not (root / "passages").exists()
    longer = "eval.context_retrieval={enabled: true, lengths: [40], counts: [1], strides: [4]}"
    assert "must fit into lm.window, but make 60 tokens" in error_line("run", root, "--set", longer)
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"pip install 'gnnlm\[passages\]'"):
        Run(config).build("passages")


def test_plan_counts_the_reading(compared: Run, tiny_run: Run) -> None:
    needs = planned(compared, HERE)
    assert list(needs) == [name for name in compared.stages if name != "codec"]
    made = sum(file.stat().st_size for file in compared.path("passages").iterdir())
    assert needs["passages"].disk == pytest.approx(made, rel=0.2)
    fewer = with_passages(compared.config, compared.root, tokens=450)
    faster = at_speed(fewer, model_sizes(compared), sizes_of_text(compared), HERE)
    assert faster["passages"].seconds < 0.7 * needs["passages"].seconds
    assert "passages" not in planned(tiny_run, HERE)
