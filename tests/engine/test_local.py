"""The local engine passes arrays on in order; what is kept is not done twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.artifact import file_digest, read_manifest
from gnnlm.engine import HERE, Arrays, FileTask, Task, here, using
from gnnlm.engine.machine_check import MISSING, MachineRequirements, difference, versions
from gnnlm.engine.shard_task import load_arrays, write_result
from gnnlm.engine.storage import SCRATCH, RunView, Storage
from gnnlm.errors import ArtifactError, EngineError, Interrupted
from gnnlm.predict.split_scoring import blocks_before, score_surely, shards_of
from gnnlm.run import Run
from gnnlm.run.run import StageRecipe
from gnnlm.run.stages import STAGES
from gnnlm.stage import ancestors
from tests.cli import error_line
from tests.conftest import WriteConfig


def numbers(count: int, kept: bool = False) -> list[Task]:
    return [Task("number", f"{number:03d}", {"number": number}, kept=kept) for number in range(count)]


def recorder(seen: list[int]) -> Callable[..., Arrays]:
    def work(number: int) -> Arrays:
        seen.append(number)
        return {"number": np.array([number])}

    return work


def test_arrays_come_in_order_and_without_files(tmp_path: Path) -> None:
    seen: list[int] = []
    found = []
    for arrays in here.arrays(tmp_path, recorder(seen), numbers(4)):
        found.append(int(arrays["number"][0]))
        assert list(tmp_path.iterdir()) == []
    assert found == seen == [0, 1, 2, 3]


def test_a_kept_task_is_not_done_again(tmp_path: Path) -> None:
    seen: list[int] = []
    list(here.arrays(tmp_path, recorder(seen), numbers(3, kept=True)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000", "001", "002"]
    found = [int(arrays["number"][0]) for arrays in here.arrays(tmp_path, recorder(seen), numbers(4, kept=True))]
    assert found == seen == [0, 1, 2, 3]


def test_a_file_that_another_engine_has_finished_is_read_and_removed(tmp_path: Path) -> None:
    seen: list[int] = []
    write_result(numbers(2)[1], recorder(seen), tmp_path)
    found = [int(arrays["number"][0]) for arrays in here.arrays(tmp_path, recorder(seen), numbers(3))]
    assert found == [0, 1, 2]
    assert seen == [1, 0, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [Interrupted, OSError])
def test_an_interrupted_file_task_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def write(number: int, path: Path) -> None:
        path.write_text("half")
        if number:
            raise error

    tasks = [FileTask("number", f"{number:03d}", {"number": number}) for number in range(2)]
    with pytest.raises(error):
        list(here.files(tmp_path, write, tasks))
    assert [path.name for path in tmp_path.iterdir()] == ["000"]


@given(count=st.integers(1, 400), block=st.integers(1, 50))
def test_shards_have_every_block_once(tiny_run: Run, count: int, block: int) -> None:
    predictor = tiny_run.snapshot.predictor
    shards = shards_of(predictor, block, ("gnn",), count)
    assert [number for shard in shards for number in shard] == list(range(-(-count // block)))


def test_a_text_scored_in_shards_is_scored_the_same(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: what a network carries into a shard is what it carries through the whole text."""
    from gnnlm.artifact import Draft

    monkeypatch.setattr("gnnlm.predict.split_scoring.SHARD", 1)
    predictor, text = tiny_run.snapshot.predictor, tiny_run.snapshot.searched("test")
    names = predictor.names
    for block in (8, 40):
        assert len(shards_of(predictor, block, names, len(text.text))) > 2
        whole = score_surely(predictor, text, block, "score", names, ("base", "gnn"))
        with Draft(tmp_path / str(block), "test", {}) as draft:
            parts = score_surely(predictor, text, block, "score", names, ("base", "gnn"), draft=draft)
        for name in names:
            np.testing.assert_array_equal(parts.log_probs[name], whole.log_probs[name])
        for state, sure in whole.sure.items():
            for mine, wanted in zip(parts.sure[state], sure, strict=True):
                np.testing.assert_array_equal(mine, wanted)
    assert blocks_before(predictor, 8, ("base", "knn")) == 0


def test_shards_that_were_scored_are_not_scored_again(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnlm.artifact import Draft
    from gnnlm.predict import split_scoring

    monkeypatch.setattr(split_scoring, "SHARD", 1)
    predictor, text, scored = tiny_run.snapshot.predictor, tiny_run.snapshot.searched("test"), list[range]()
    real = split_scoring.score_blocks

    def counted(*given: Any, **named: Any) -> Any:
        scored.append(range(named["start"], named["stop"]))
        if len(scored) == 3:
            raise Interrupted
        return real(*given, **named)

    monkeypatch.setattr(split_scoring, "score_blocks", counted)
    for attempt in (Interrupted, None):
        with Draft(tmp_path / "report", "eval", {}) as draft:
            if attempt:
                with pytest.raises(attempt):
                    score_surely(predictor, text, 40, "score", ("gnn",), (), draft=draft)
            else:
                score_surely(predictor, text, 40, "score", ("gnn",), (), draft=draft)
    assert scored.count(scored[0]) == scored.count(scored[1]) == 1
    assert scored.count(scored[2]) == 2


# -- the same work in a process that has only the run directory -------------------------------------------------------


def test_work_is_made_again_from_the_run_directory(tiny_run: Run, tmp_path: Path) -> None:
    """What a worker elsewhere would do gives the bytes that are in the run."""
    cases: dict[tuple[str, str], tuple[dict[str, Any], str, str]] = {
        ("encode", "encode"): ({"split": "test", "segment": 0, "shard": 0}, "states", "store/test.states.npy"),
        ("search", "search"): ({"split": "train", "shard": 0}, "ids", "search/train.ids.npy"),
        ("cache", "tables"): (
            {"segment": 0, "projected": True, "shard": 0},
            "layer0",
            "segments/0000/cache/layer0.npy",
        ),
    }
    for (stage, kind), (arguments, name, file) in cases.items():
        made = StageRecipe(stage)(tiny_run.root, kind)(**arguments)[name]
        assert len(made) >= 50
        assert made.tobytes() == np.load(tiny_run.root / file)[: len(made)].tobytes()


def test_a_stage_needs_what_it_depends_on(tiny_run: Run) -> None:
    assert ancestors(tiny_run.stages, "search") == ["corpus", "encode", "index"]
    assert ancestors(tiny_run.stages, "encode") == ["corpus"]
    needs = tiny_run.snapshot.place("search").needs
    assert {"config.yaml", "corpus", "store", "index", "segments/0000/text", "segments/0000/states"} <= set(needs)
    assert "gnn" not in needs


def test_every_kind_of_task_can_be_done_elsewhere() -> None:
    source = Path(__file__).parents[2] / "src" / "gnnlm"
    text = "".join(path.read_text() for path in source.rglob("*.py"))
    assert set(re.findall(r'\b(?:File|Shard)?Tasks?\((?:spread, )?\s*"(\w+)"', text)) == {
        kind for stage in STAGES.values() for kind in stage.tasks
    }


def test_threads_are_recorded(tiny_run: Run) -> None:
    for folder in ("store", "segments/0000/states", "report"):
        assert read_manifest(tiny_run.root / folder).made_with == {"threads": HERE.threads}


# -- storage ----------------------------------------------------------------------------------------------------------


def test_a_run_directory_seen_through_storage(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    storage = Storage(f"file://{tmp_path}/bucket")
    view = RunView.of(tiny_run.root, tiny_run.snapshot.place("search").needs)
    storage.upload(tiny_run.root, view)
    root = storage.download(view)
    assert root == storage.download(view)
    for name, digest in view.files.items():
        assert file_digest(root / name) == file_digest(tiny_run.root / name) == digest
    found = StageRecipe("search")(root, "search")(split="test", shard=0)
    ids = np.load(tiny_run.root / "search" / "test.ids.npy")
    assert len(found["ids"]) >= 9
    assert found["ids"].tobytes() == ids[: len(found["ids"])].tobytes()


def test_damaged_storage_is_refused(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    storage, view = Storage(f"file://{tmp_path}/bucket"), RunView.of(tiny_run.root, ["corpus"])
    storage.upload(tiny_run.root, view)
    victim = max((tmp_path / "bucket" / "files").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{victim.name} is damaged"):
        storage.download(view)


def test_storage_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be used"):
        Storage("nosuch://bucket").has("x")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngineError, match="cannot be read or written"):
        Storage(f"file://{tmp_path}/file/below").put(tmp_path / "file", "x")


# -- bad input --------------------------------------------------------------------------------------------------------


def test_machines_that_differ() -> None:
    here_, root = {"torch": "2.6.0", "model m": "1f", "file": "there"}, Path("/runs/mine")
    assert difference("node 2", here_, dict(here_), root) is None
    assert "node 2 has torch 2.5.1, this machine 2.6.0" in str(difference("node 2", here_, {"torch": "2.5.1"}, root))
    assert "lacks the model m" in str(difference("node 2", here_, here_ | {"model m": MISSING}, root))
    assert "has other files for the model m" in str(difference("node 2", here_, here_ | {"model m": "2e"}, root))
    assert "does not see /runs/mine" in str(difference("node 2", here_, here_ | {"file": MISSING}, root))
    assert versions()["torch"] != MISSING
    assert MachineRequirements({"m": lambda: "1f"}, Path("/no/such/file")).facts()["file"] == MISSING


def test_engines_that_are_not_there(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="expected an engine named local or ray, got 'spark'"), using("spark"):
        pass
    with pytest.raises(EngineError, match="add --engine ray"), using("local", "auto"):
        pass
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install 'gnnlm\[cluster\]'"), using("ray"):
        pass


def test_the_command_line_names_the_engines(write_config: WriteConfig) -> None:
    assert "expected an engine named local or ray" in error_line("run", write_config(), "--engine", "dask")


def test_a_damaged_shard_is_noticed_and_done_again(tmp_path: Path) -> None:
    def work() -> Arrays:
        return {"values": np.arange(1000, dtype=np.float16), "none": np.empty((0, 3), np.int32)}

    path = write_result(Task("some", "shard"), work, tmp_path)
    assert load_arrays(path)["values"].tolist() == list(range(1000))
    assert load_arrays(path)["none"].shape == (0, 3)
    for damage in (lambda content: content[:-100] + b"x" + content[-99:], lambda content: content[:50]):
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ArtifactError, match="was damaged after it was written, and is removed; run the same"):
            load_arrays(path)
        assert not path.exists()
        write_result(Task("some", "shard"), work, tmp_path)
