"""Compaction copies, erasing deletes: no byte of a removed text is left, and what may remember it is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gnnlm
from gnnlm.artifact import Artifact, write_json
from gnnlm.artifact.manifest import MANIFEST, read_manifest
from gnnlm.config import load_config, parse_config
from gnnlm.errors import ArtifactError
from gnnlm.generation import Holder
from gnnlm.library.erase_scan import ErasedSamples
from gnnlm.library.library import Library
from gnnlm.library.results import ErasureChange
from gnnlm.run import Run
from gnnlm.run.doctor import examine
from tests.cli import error_line
from tests.cli import gnnlm as command
from tests.conftest import merge
from tests.library.conftest import make_text


def erased(library: Library, **options: Any) -> ErasureChange:
    change = library.compact(erase=True, **options)
    assert isinstance(change, ErasureChange)
    return change


def all_bytes(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def holding(root: Path, piece: bytes) -> set[str]:
    return {name for name, data in all_bytes(root).items() if piece in data}


def everything_else(root: Path, library: Library, name: str) -> bytes:
    """The text, tokens, states, codes, cached states and keys of all other documents, and of valid and test."""
    found = [path.read_bytes() for folder in ("corpus", "store") for path in (root / folder).iterdir()]
    for segment in library.history()[-1].segments:
        starts = np.load(root / segment.name / "text" / "starts.npy")
        names = json.loads((root / segment.name / "text" / "names.json").read_text())
        for number in (number for number, other in enumerate(names) if other != name):
            rows = slice(starts[number], starts[number + 1])
            for file in ("text/tokens.npy", "states/states.npy", "codes/codes.npy", "cache/layer0.npy"):
                found.append(np.load(root / segment.name / file)[rows].tobytes())
            keys = np.load(root / segment.name / "states/states.npy")[rows].astype(np.float32)
            found.append((keys / np.linalg.norm(keys, axis=1, keepdims=True)).tobytes())
    texts = [line for line in holding_lines(root) if json.loads(line)["name"] != name]
    return b"\0\0\0".join([*found, *texts])


def holding_lines(root: Path) -> list[bytes]:
    files = [*root.glob("segments/*/text/documents.jsonl"), *root.glob("added/*/text/documents.jsonl")]
    return [line for file in files for line in file.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def indexed(tiny_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, quick_codes: None) -> Run:
    """A run with everything that a segment can have: codes, a FAISS index, tables of a cache."""
    changes = {
        "index": {"kind": "IVF4,Flat"},
        "codec": {"kind": "pq", "bytes": 8, "train_rows": 1000},
        "store": {"segment_tokens": 1200},
    }
    values = merge(tiny_values, changes)
    run = Run(parse_config({"run": str(tmp_path_factory.mktemp("runs") / "indexed"), **values}))
    run.build_all()
    return run


@pytest.mark.parametrize("kind", ["added", "built"])
def test_no_byte_of_an_erased_document_is_left(indexed: Run, tmp_path: Path, kind: str) -> None:
    """Looked for by hand: every line of the text, its tokens, its states, codes, keys and cached states."""
    root = Path(shutil.copytree(indexed.root, tmp_path / "run"))
    library = Library(root)
    library.add_texts({"secret": make_text(1), "other": make_text(2)})
    name = "secret" if kind == "added" else library.documents()[3].name
    book = gnnlm.open(root)
    text, store = book.document(name).text, book.model.store
    number = store.names.index(name)
    first, last = store.document_starts[number : number + 2].tolist()
    (place,) = [i for i, base in enumerate(store.bases.tolist()[1:]) if first < base and first >= store.bases[i]]
    rows = slice(first - int(store.bases[place]) + 1, last - int(store.bases[place]))
    segment = root / library.history()[-1].segments[place].name
    tokens = np.load(segment / "text" / "tokens.npy")[rows]
    pieces = [line.encode() for line in text.splitlines() if line]
    pieces += [tokens[at : at + 16].tobytes() for at in range(0, len(tokens) - 16, 8)]
    for file in ("states/states.npy", "codes/codes.npy", "cache/layer0.npy"):
        found = [row.tobytes() for row in np.load(segment / file)[rows]]
        pieces += [row for row in found if len(row) >= 16]
    keys = np.load(segment / "states" / "states.npy")[rows].astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    indexed_keys = (segment / "index" / "index.faiss").read_bytes()
    pieces += [row.tobytes() for row in keys if row.tobytes() in indexed_keys]  # what FAISS stores, to the last bit
    others = everything_else(root, library, name)
    pieces = [piece for piece in pieces if piece not in others]  # documents may begin alike
    assert len(pieces) > 4 * len(tokens) / 2
    assert all(holding(root, piece) for piece in pieces[:: len(pieces) // 40])
    del book, store
    library.remove(name)
    assert holding(root, pieces[0])  # removed is not erased
    change = erased(library)
    assert change.erased == (name,)
    assert change.found == ()
    assert change.searched > 100_000
    left = b"\0\0\0".join(all_bytes(root).values())
    assert not [piece for piece in pieces if piece in left]
    assert any("graph network" in line for line in change.may_remember)
    assert any("codebooks of the states" in line for line in change.may_remember)
    assert any("centroids" in line for line in change.may_remember)
    run = Run(load_config(root))
    assert {run.state(stage) for stage in run.stages.values()} == {"done"}
    after = gnnlm.open(root)
    assert name not in {document.name for document in after.documents}
    assert len(after.documents) == 9
    assert name not in {near.document for line in after.neighbors(text[:60], k=8) for near in line}
    assert np.isfinite(after.score(make_text(2)[:60]).gnn_knn).all()


def test_compaction_copies_and_changes_no_answer(indexed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(shutil.copytree(indexed.root, tmp_path / "run"))
    library = Library(root)
    for number in range(3):
        library.add_texts({f"n{number}": make_text(number), f"m{number}": make_text(10 + number)}, tags=[f"t{number}"])
    library.remove(["n1", "m1", library.documents()[0].name])
    text = make_text(0)[:80]
    before = gnnlm.open(root)
    scores, near = before.score(text), before.neighbors(text, k=6)
    listed = [(entry.name, entry.tokens, entry.tags) for entry in library.documents()]
    count = len(library.history()[-1].segments)
    monkeypatch.setattr("gnnlm.datastore.encode.encode_windows", None)  # nothing is encoded again
    change = library.compact()
    assert change.rows == len(before.model.index)
    assert len(library.history()[-1].segments) < count
    assert [(entry.name, entry.tokens, entry.tags) for entry in library.documents()] == listed
    monkeypatch.undo()
    after = gnnlm.open(root)
    for name, values in after.score(text).log_probs.items():
        np.testing.assert_allclose(values, scores.log_probs[name], atol=1e-6, err_msg=name)
    for one, two in zip(near, after.neighbors(text, k=6), strict=True):
        np.testing.assert_allclose([n.similarity for n in one], [n.similarity for n in two], atol=1e-6)
        assert (one[0].document, one[0].start) == (two[0].document, two[0].start)
    assert library.compact().generation == change.generation  # there is nothing left to do


def test_text_that_was_copied_elsewhere_in_the_run_is_found(root: Path) -> None:
    """The search can fail: a file that still has the text, its tokens or its states is named."""
    library = Library(root)
    library.add_texts({"secret": make_text(1)})
    ids = library.run.snapshot.lm.tokenize(make_text(1))[0]
    states = np.load(root / "added" / "0001.0" / "states" / "states.npy")
    (root / "notes.txt").write_text("as it says there: " + make_text(1)[40:120])
    (root / "tokens.bin").write_bytes(b"..." + np.array(ids, dtype=np.int16)[8:60].tobytes())
    (root / "states.bin").write_bytes(states[9:20].tobytes())
    (root / "escaped.json").write_text(json.dumps({"text": make_text(1)}))
    library.remove("secret")
    change = erased(library)
    assert {Path(path).name for path in change.found} == {"notes.txt", "tokens.bin", "states.bin", "escaped.json"}


def test_manifests_that_stay_are_searched(root: Path) -> None:
    """Those of the erased segment too, which are all that is left of it."""
    library = Library(root)
    name = library.documents()[0].name
    text = gnnlm.open(root).document(name).text
    left = [root / "segments" / "0000" / part for part in ("states", "text")]
    library.remove(name)
    for folder in left:
        manifest = read_manifest(folder)
        manifest.facts["note"] = text[40:120]
        write_json(folder / MANIFEST, manifest.as_json())
    assert set(erased(library).found) == {str(folder / MANIFEST) for folder in left}


def test_text_that_other_documents_have_too_is_not_taken_for_it(root: Path) -> None:
    library = Library(root)
    shared = make_text(1)
    library.add_texts({"one": shared, "two": shared + make_text(2)})
    held_out = library.run.snapshot.streams["valid"].documents[0].text
    library.add_texts({"valid": held_out})
    library.remove(["one", "valid"])
    change = erased(library)
    assert set(change.erased) == {"one", "valid"}
    assert change.found == ()


def test_what_was_compacted_without_erasing_is_erased_later(root: Path) -> None:
    library = Library(root)
    name = library.documents()[0].name
    line = gnnlm.open(root).document(name).text.splitlines()[0].encode()
    library.remove(name)
    library.compact()
    assert holding(root, line)  # the stages of the run still have it
    assert erased(library).erased == (name,)
    assert not holding(root, line)


def test_erased_segments_leave_the_stages_done_and_say_so_when_they_are_read(root: Path) -> None:
    library = Library(root)
    name = library.documents()[0].name
    library.remove(name)
    erased(library)
    status = json.loads(command("status", root, "--json").stdout.splitlines()[-1])
    assert {stage["state"] for stage in status.values()} == {"done"}
    assert "already done" in command("run", root).stderr
    assert [each.number for each in Library(root).history()] == [0, 1, 2]
    with pytest.raises(ArtifactError, match=r"was erased; .*gnnlm history"):
        Artifact.open(root / "segments" / "0000" / "states").array("states.npy")
    assert "was erased" in error_line("train", root, "--rebuild")
    Run(load_config(root), reading=True).copy(root.parent / "copy")
    assert len(gnnlm.open(root.parent / "copy").documents) == 7
    run = Run(load_config(root))  # the corpus is still there: building it again brings its text back
    run.build("corpus", rebuild=True)
    assert holding(root, run.snapshot.streams["train"].documents[0].text.splitlines()[0].encode())


def test_a_store_whose_base_was_erased_goes_on_changing(root: Path, write: Callable[..., Path]) -> None:
    library = Library(root)
    library.remove(library.documents()[0].name)
    erased(library)
    library = Library(root)
    assert library.add_texts({"new": make_text(1)}).added == ("new",)
    assert library.sync(write(other=make_text(2))).added == ("other.txt",)
    library.remove("new")
    assert erased(Library(root)).erased == ("new",)
    assert len(gnnlm.open(root).documents) == 8


def test_readers_of_older_generations_keep_text_from_being_erased(root: Path) -> None:
    library = Library(root)
    library.add_texts({"secret": make_text(1)})
    book = gnnlm.open(root)
    library.remove("secret")
    with pytest.raises(ArtifactError, match=r"process \d+ on .* reads generation 1 of .*; refresh or end it"):
        library.compact(erase=True, wait=0)
    assert book.document("secret").text == make_text(1)
    book.refresh()
    assert erased(library).erased == ("secret",)
    held = root / "leases" / "far.json"
    held.write_text(json.dumps({**Holder("another-machine", 7, "x").as_json(), "generation": 0}))
    with pytest.raises(ArtifactError, match="process 7 on another-machine reads generation 0"):
        library.compact(erase=True, wait=0.2)


def test_erasing_that_was_interrupted_goes_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after half of the files: the next erasing deletes the rest."""
    library = Library(root)
    name = library.documents()[0].name
    line = gnnlm.open(root).document(name).text.splitlines()[0].encode()
    library.remove(name)
    real, count = Path.unlink, [0]

    def killed(path: Path, missing_ok: bool = False) -> None:
        if "segments" in path.parts:
            count[0] += 1
            if count[0] > 2:
                raise KeyboardInterrupt
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        library.compact(erase=True)
    monkeypatch.undo()
    assert holding(root, line)
    run = Run(load_config(root))
    assert {run.state(stage) for stage in run.stages.values()} == {"done"}
    assert len(gnnlm.open(root).documents) == 7
    erased(library)
    assert not holding(root, line)


def test_erasing_that_was_interrupted_before_its_search_is_noticed_and_searches_for_as_much(
    root: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    library, made, of = Library(root), list[ErasedSamples](), ErasedSamples.of
    library.add_texts({"secret": make_text(1), "other": make_text(2)})
    library.remove("secret")

    def kept(*given: Any) -> ErasedSamples:
        made.append(of(*given))
        return made[-1]

    def lost(*_: object) -> None:
        raise ArtifactError("the power is gone")

    monkeypatch.setattr(ErasedSamples, "of", kept)
    with monkeypatch.context() as patch:
        patch.setattr(ErasedSamples, "search", lost)
        with pytest.raises(ArtifactError, match="power"):
            library.compact(erase=True)
    line = make_text(1).splitlines()[0].encode()
    left = holding(root, line)
    assert left
    logged()
    assert examine(Run(load_config(root), reading=True)).ok
    told = logged().replace("\n", " ")
    assert "holds documents that are not served any more" in told
    assert "--erase" in told
    change = erased(Library(root))
    assert change.found == ()
    assert made[0].pieces == made[1].pieces  # states too
    assert not holding(root, line)
    examine(Run(load_config(root), reading=True))
    assert "not served any more" not in logged()


def test_forks_are_named(root: Path, tmp_path: Path) -> None:
    Run(load_config(root)).fork(load_config(root, (f"run={tmp_path / 'fork'}",)))
    library = Library(root)
    library.remove(library.documents()[0].name)
    assert any("a fork or a copy of this run has them still" in line for line in erased(library).may_remember)
