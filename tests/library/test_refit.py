"""Fitting mix, index and network again: what comes out is what a run of the served documents has, and can be undone."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnlm
from gnnlm.artifact import reader
from gnnlm.config import load_config, parse_config
from gnnlm.errors import ArtifactError, ConfigError, LimitError
from gnnlm.generation import current_number, read_current
from gnnlm.library import library as library_module
from gnnlm.library.library import Library
from gnnlm.run import Run
from gnnlm.run.doctor import examine
from gnnlm.run.drift import Drift, Measuring
from gnnlm.run.snapshot import Snapshot
from tests.cli import error_line
from tests.conftest import merge, write_texts
from tests.library.conftest import make_text
from tests.library.test_commands import last

NEW = {f"n{number}": make_text(number, 12) for number in range(4)}


def states_of(root: Path) -> set[str]:
    run = Run(load_config(root))
    return {run.state(stage) for stage in run.stages.values()}


def served(root: Path) -> Snapshot:
    return Run(load_config(root), reading=True).snapshot.at(read_current(root))


def scores(book: gnnlm.Book, text: str = make_text(1, 2)) -> dict[str, Any]:
    return dict(book.score(text).log_probs)


def replaced(library: Library, left: int = 1) -> Library:
    """The library with its store replaced by other text, but for so many documents."""
    base = [entry.name for entry in library.documents()]
    library.add_texts(NEW)
    library.remove(base[left:])
    return library


def index_drift(root: Path) -> Drift:
    return Measuring(served(root)).index()


@pytest.fixture(scope="module")
def changed_run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(shutil.copytree(tiny_run.root, tmp_path_factory.mktemp("changed") / "run"))
    replaced(Library(root))
    return root


@pytest.fixture
def changed(changed_run: Path, tmp_path: Path) -> Library:
    """A run of which most documents were replaced."""
    return Library(shutil.copytree(changed_run, tmp_path / "run"))


# -- against a run that was built of the same documents --------------------------------------------------------------


def test_network_and_mix_are_those_of_a_run_of_these_documents(tiny_values: dict[str, Any], tmp_path: Path) -> None:
    texts = {split: write_texts(tmp_path / split, 4, 8, seed) for seed, split in enumerate(("train", "valid", "test"))}
    more = tmp_path / "more"
    more.mkdir()
    for number in range(2):
        (more / f"z{number}.txt").write_text(make_text(number, 10))
    whole = Path(shutil.copytree(texts["train"], tmp_path / "whole"))
    shutil.copytree(more, whole, dirs_exist_ok=True)
    for name in ("doc00.txt", "doc02.txt"):
        (whole / name).unlink()
    values = merge(tiny_values, {"store": {"dtype": "fp32"}, "cache": {"dtype": "fp32"}})
    corpus = {"source": None, **{split: str(folder) for split, folder in texts.items()}}
    small = Run(parse_config(merge(values, {"run": str(tmp_path / "small"), "corpus": corpus})))
    small.build_all()
    library = Library(small.root)
    library.add(more)
    library.remove(["doc00.txt", "doc02.txt"])
    made = library.refit("gnn")
    assert made.stages == ("train", "cache", "tune")
    corpus["train"] = str(whole)
    built = Run(parse_config(merge(values, {"run": str(tmp_path / "built"), "corpus": corpus})))
    for stage in list(built.stages)[:-1]:
        built.build(stage)
    now = served(small.root)
    found, expected, old = (one.artifact("train") for one in (now, built.snapshot, small.snapshot))
    weights, others = found.tensors("model.safetensors"), old.tensors("model.safetensors")
    for name, tensor in expected.tensors("model.safetensors").items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(tensor, others[name]) for name, tensor in weights.items())
    mixes, wanted = (one.artifact("tune").facts for one in (now, built.snapshot))
    assert mixes["mix"] != small.artifact("tune").facts["mix"]
    for name in ("base", "gnn"):
        assert (mixes["mix"][name]["k"], mixes["mix"][name]["temperature"]) == (
            wanted["mix"][name]["k"],
            wanted["mix"][name]["temperature"],
        )
    assert mixes["valid_loss"] == pytest.approx(wanted["valid_loss"], abs=1e-4)
    text = (more / "z0.txt").read_text()[:150]
    here, there = scores(gnnlm.open(small.root), text), scores(gnnlm.open(built.root), text)
    for name, expected_T in there.items():
        np.testing.assert_allclose(here[name], expected_T, atol=2e-3, err_msg=name)


# -- each part -------------------------------------------------------------------------------------------------------


def test_a_mix_is_fitted_once_for_a_store(changed: Library) -> None:
    root = changed.run.root
    book, before = gnnlm.open(root), served(root)
    old = scores(book)
    made = changed.refit("mix")
    assert made.as_json().keys() == {"generation", "added", "removed", "rows", "seconds", "part", "stages"}
    assert (made.generation, made.part, made.stages) == (3, "mix", ("tune",))
    now = served(root)
    assert now.artifact("tune").facts["mix"] != before.artifact("tune").facts["mix"]
    for name, values in scores(book).items():  # a reader keeps what it has opened
        np.testing.assert_array_equal(values, old[name])
    assert book.refresh()
    new = scores(book)
    np.testing.assert_array_equal(new["gnn"], old["gnn"])  # the network is the same
    assert not np.array_equal(new["gnn_knn"], old["gnn_knn"])
    assert [each.what for each in changed.history()] == ["run", "add", "remove", "refit mix"]
    assert changed.refit("mix").generation == 3  # nothing has changed since
    assert changed.refit("mix").stages == ()
    assert states_of(root) == {"done"}
    changed.add_texts({"later": make_text(50)})
    assert served(root).artifact("tune").fingerprint == now.artifact("tune").fingerprint
    assert changed.refit("mix").generation == 5
    assert book.refresh()  # it has read the other mix until now
    assert changed.refit("mix").generation == 5
    assert sorted(path.name for path in (root / "refitted").iterdir()) == ["0005"]


def test_text_of_valid_takes_no_part(changed: Library) -> None:
    """A store with a document of valid would look far better on valid than it is."""
    changed.refit("mix")
    without = served(changed.run.root).artifact("tune").facts
    valid = changed.run.snapshot.streams["valid"].documents[0].text
    assert changed.add_texts({"leak": valid}).overlapping == ("leak",)
    assert changed.refit("mix").stages == ("tune",)
    found = served(changed.run.root).artifact("tune").facts
    assert found["mix"] == without["mix"]
    assert found["valid_loss"] == pytest.approx(without["valid_loss"], abs=1e-5)
    assert "leak" in {near.document for near in gnnlm.open(changed.run.root).neighbors(valid[:80], k=1)[-1]}


def test_a_network_is_served_from_its_own_generation_on(changed: Library, tmp_path: Path) -> None:
    root = changed.run.root
    book = gnnlm.open(root)
    old = scores(book)
    changed.refit("gnn")
    assert not (root / "refitted" / "0003" / "search").exists()  # it was made on the way
    for name, values in scores(book).items():
        np.testing.assert_array_equal(values, old[name])
    new = gnnlm.open(root)
    assert np.abs(scores(new)["gnn"] - old["gnn"]).max() > 1e-3
    np.testing.assert_array_equal(scores(new)["base"], old["base"])
    changed.add_texts({"later": make_text(50, 6)})
    new.refresh()
    tables = served(root)
    assert tables.artifact("cache").parts[-1].inputs["network"] == tables.artifact("train").fingerprint
    prediction, _ = new.model.read([new.model.lm.tokenize(make_text(50, 2))[0]], wanted=new.predictors)
    for name, log_probs_TV in prediction[0].log_probs(new.predictors).items():
        total_T = log_probs_TV.double().exp().sum(-1)
        torch.testing.assert_close(total_T, torch.ones_like(total_T), rtol=0, atol=1e-4, msg=name)
    want = scores(new)
    gnnlm.Library(root).run.copy(tmp_path / "copy")
    gnnlm.Library(tmp_path / "copy").run.copy(tmp_path / "of a copy")
    assert list((tmp_path / "of a copy").rglob("*.partial")) == list((tmp_path / "copy").rglob("*.partial")) == []
    for name, values in scores(gnnlm.open(tmp_path / "of a copy")).items():
        np.testing.assert_allclose(values, want[name], atol=1e-6)
    assert states_of(root) == {"done"}
    book.refresh()
    erased = changed.compact(erase=True, readers=[book, new])
    assert erased.found == ()  # type: ignore[attr-defined]
    assert any("refitted/0003/gnn" in line for line in erased.may_remember)  # type: ignore[attr-defined]
    assert list((root / "refitted").glob("*/segments/*")) == []  # the parts of segments that are gone
    for name, values in scores(gnnlm.open(root)).items():
        np.testing.assert_allclose(values, want[name], atol=1e-2)
    gnnlm.Library(root).run.copy(tmp_path / "compacted")  # of the parts that its refits name, some are gone
    assert list((tmp_path / "compacted").rglob("*.partial")) == []
    assert changed.refit("gnn").stages == ("train", "cache", "tune")  # the segments that stages built are not needed
    assert states_of(root) == {"done"}


def test_an_index_finds_more_of_a_store_that_it_was_trained_for(tiny_values: dict[str, Any], tmp_path: Path) -> None:
    own = {"run": str(tmp_path / "run"), "index": {"kind": "IVF8,SQ4", "probes": 1}, "gnn": {"layers": 0}}
    run = Run(parse_config(merge(tiny_values, own)))
    run.build_all()
    library = replaced(Library(run.root), left=0)
    with pytest.raises(ConfigError, match=r"gnn\.layers is 0"):
        library.refit("gnn")
    before, book = index_drift(run.root), gnnlm.open(run.root)
    assert before.refit
    assert before.figures["then"] == run.artifact("index").facts["recall"]
    library.refit("index")
    after = index_drift(run.root)
    assert after.figures["now"] == after.figures["then"]
    assert after.figures["now"]["128"] > before.figures["now"]["128"] + 0.02
    assert not after.refit
    library.add_texts({"later": make_text(50, 6)})
    made = served(run.root).artifact("index")
    trained = made.manifest.files["trained.faiss"].sha256
    assert [part.inputs["trained"] for part in made.parts] == [trained] * 3
    assert trained != run.artifact("index").manifest.files["trained.faiss"].sha256
    assert gnnlm.open(run.root).neighbors(make_text(50, 6)[:80], k=1)[-1][0].document == "later"
    assert book.neighbors(make_text(1, 2)[:80], k=1)
    assert states_of(run.root) == {"done"}
    library.compact()
    assert served(run.root).artifact("index").parts[0].inputs["trained"] == trained


# -- interruptions and refusals --------------------------------------------------------------------------------------


def test_an_interrupted_refit_leaves_the_old_generation_and_goes_on(
    changed: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = changed.run.root

    def lost(*_: object, **__: object) -> None:
        raise ArtifactError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(library_module.Transaction, "commit", lost)
        with pytest.raises(ArtifactError, match="power"):
            changed.refit("mix")
    assert current_number(root) == 2
    manifest = root / "refitted" / "0003" / "tune" / "manifest.json"
    made = manifest.stat().st_mtime_ns
    assert changed.refit("mix").generation == 3
    assert manifest.stat().st_mtime_ns == made  # it was found, not made again
    with monkeypatch.context() as patch:
        patch.setattr(library_module.Transaction, "commit", lost)
        changed_again = Library(root)
        with pytest.raises(ArtifactError, match="power"):
            changed_again.refit("gnn")
    assert (root / "refitted" / "0004").is_dir()
    changed.add_texts({"later": make_text(50)})  # another change does not need it
    assert sorted(path.name for path in (root / "refitted").iterdir()) == ["0003"]


def test_a_refit_of_another_part_does_not_go_on_from_an_interrupted_one(
    changed: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mix needs neighbours of valid alone, a network of train too."""

    def lost(*_: object, **__: object) -> None:
        raise ArtifactError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(library_module.Transaction, "commit", lost)
        with pytest.raises(ArtifactError, match="power"):
            changed.refit("mix")
    assert Library(changed.run.root).refit("gnn").stages == ("train", "cache", "tune")


@pytest.mark.parametrize("what", ["a manifest that was changed", "no manifest of ours", "no folder"])
def test_a_damaged_refit_is_mended_by_the_command_that_is_named(changed: Library, what: str) -> None:
    root = changed.run.root
    changed.refit("gnn")
    folder = root / "refitted" / "0003" / "gnn"
    manifest = folder / "manifest.json"
    if what == "no folder":
        shutil.rmtree(folder)
    else:
        manifest.write_bytes(manifest.read_bytes().replace(b"train", b"trail", 1) if "changed" in what else b"?")
    named = f"gnnlm refit {root} --part gnn"
    with pytest.raises(ArtifactError, match=named):
        gnnlm.open(root)
    problems = examine(Run(load_config(root), reading=True)).problems
    assert any(named in problem for problem in problems), problems
    assert Library(root).refit("gnn").stages == ("train", "cache", "tune")
    assert gnnlm.open(root).generation == 4
    assert examine(Run(load_config(root), reading=True)).ok


def test_a_mended_segment_was_seen_by_the_network_as_before(changed: Library) -> None:
    root = changed.run.root
    changed.refit("gnn")
    changed.add_texts({"later": make_text(50), "latest": make_text(51)})
    changed.remove(["later", "n1"])
    now = read_current(root)
    assert now is not None
    assert [one.unseen for one in now.segments] == [(), (), (0, 1)]
    for segment in now.segments[1:]:
        file = root / segment.name / "states" / "states.npy"
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    Library(root).renew()
    now = read_current(root)
    assert now is not None
    assert [(one.documents, one.unseen) for one in now.segments[1:]] == [(3, ()), (1, (0,))]


def test_where_no_more_files_may_be_open_nothing_is_taken_for_damaged(
    changed: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that took a segment for damaged would remove its documents."""
    root, tried = changed.run.root, list[object]()
    changed.run.open_all()

    def no_more(*given: object, **__: object) -> None:
        tried.append(given)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(reader, "open", no_more, raising=False)
        with pytest.raises(LimitError, match="no more open files"):
            changed.renew()
    assert len(tried) == 1
    assert current_number(root) == 2
    assert {entry.name for entry in Library(root).documents()} >= set(NEW)


def test_a_network_that_reads_some_positions_reads_those_that_came_last(
    tiny_values: dict[str, Any], tmp_path: Path
) -> None:
    """Under search.max_train a refit would else never read what was added."""
    own = {"run": str(tmp_path / "run"), "search": {"max_train": 300}}
    run = Run(parse_config(merge(tiny_values, own)))
    run.build_all()
    library = Library(run.root)
    library.add_texts({"one": make_text(1), "two": make_text(2)})
    library.remove("one")
    now = served(run.root)
    positions, text = now.train_positions, now.streams["train"]
    assert len(positions) == 300
    assert positions.max() == len(text) - 1
    names = {text.names[int(number)] for number in text.document_of(positions)}
    assert "two" in names
    assert "one" not in names


def test_after_a_rebuild_a_refit_is_left_behind(changed: Library) -> None:
    root = changed.run.root
    changed.refit("mix")
    config = load_config(root, ("tune.lambdas=[0.0, 0.2]",))
    Run(config).build("tune", rebuild=True)
    with pytest.raises(ArtifactError, match=r"made with another tune, rebuilt since.*gnnlm renew"):
        gnnlm.open(root)
    Library(root).renew()
    now = read_current(root)
    assert now is not None
    assert now.refitted == {}
    assert not (root / "refitted").exists()
    assert gnnlm.open(root).generation == 4


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("index", "is searched exactly .*; there is no index to fit"),
        ("codec", "expected one of the parts mix, index, gnn to refit"),
    ],
)
def test_what_cannot_be_refitted_is_refused(changed: Library, part: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed.refit(part)
    assert current_number(changed.run.root) == 2


def test_a_store_that_has_not_changed_needs_no_refit(root: Path, library: Library) -> None:
    assert "nothing to refit" in error_line("refit", root, "--part", "mix")
    assert not (root / "refitted").exists()
    library.add_texts({"one": make_text(1)})
    made = last("refit", root, "--part", "mix")
    assert (made["generation"], made["stages"]) == (2, ["tune"])
