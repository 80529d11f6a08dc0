"""A store that changes: what is added is found, what is removed is not, and readers keep what they opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnlm
from gnnlm.artifact import Artifact
from gnnlm.config import load_config, parse_config
from gnnlm.errors import ArtifactError, ConfigError, CorpusError
from gnnlm.generation import current_number, leases_of
from gnnlm.library.library import Library
from gnnlm.predict.open_book import OpenBook
from gnnlm.run import Run
from gnnlm.write.drafter import Drafter
from tests.conftest import WriteConfig, merge, write_texts
from tests.library.conftest import make_text

Write = Callable[..., Path]


def states_of(run: Run) -> set[str]:
    return {run.state(stage) for stage in run.stages.values()}


def found_in(book: gnnlm.Book, text: str, **filters: Any) -> set[str]:
    return {near.document for line in book.neighbors(text, k=4, **filters) for near in line}


# -- adding ------------------------------------------------------------------------------------------------------------


def test_what_is_added_is_found_and_nothing_is_trained_again(root: Path, library: Library, write: Write) -> None:
    book = gnnlm.open(root)
    before, text = repr(book), make_text(1)
    change = library.add(write(one=text, two=make_text(2)))
    assert change.as_json() == {
        "generation": 1,
        "added": 2,
        "removed": 0,
        "rows": change.rows,
        "seconds": pytest.approx(change.seconds, abs=1e-3),
    }
    assert "one.txt" not in found_in(book, text[:60])  # an open book keeps what it opened
    assert (book.generation, repr(book)) == (0, before)
    assert book.refresh()
    assert not book.refresh()
    assert book.generation == 1
    assert found_in(book, text[:60]) & {"one.txt"}
    assert [document.name for document in book.documents][-2:] == ["one.txt", "two.txt"]
    assert book.document("two.txt").text == make_text(2)
    assert len(book.model.index) == change.rows
    assert states_of(Run(load_config(root))) == {"done"}


def test_a_written_text_cites_what_was_added(root: Path, library: Library) -> None:
    text = make_text(3, sentences=8)
    library.add_texts({"cited": text})
    written = gnnlm.open(root).generate(text[:80], max_tokens=24, predictor="knn")
    assert "cited" in {source.document for token in written.tokens for source in token.sources}
    for token in written.tokens:
        assert sum(source.share for source in token.sources) <= token.book + 1e-6


def test_the_same_text_under_the_same_name_is_no_change(library: Library, write: Write) -> None:
    folder = write(one=make_text(1))
    assert library.add(folder).generation == 1
    again = library.add(folder)
    assert (again.generation, again.added) == (1, ())
    assert library.replace(folder).generation == 1
    base = library.documents()[0].name
    text = gnnlm.open(library.run.root).document(base).text
    assert library.add_texts({base: text}).generation == 1


def test_other_text_under_the_same_name_is_a_replacement(library: Library, write: Write) -> None:
    library.add(write(one=make_text(1)), tags=["manual"])
    with pytest.raises(CorpusError, match=r"'one\.txt' with other text; use replace"):
        library.add(write(one=make_text(2)))
    with pytest.raises(CorpusError, match=r"no document named 'three\.txt' to replace; use add"):
        library.replace(write("other", three=make_text(3)))
    change = library.replace(write(one=make_text(2)))
    assert (change.generation, change.added, change.removed) == (2, ("one.txt",), ("one.txt",))
    book = gnnlm.open(library.run.root)
    assert book.document("one.txt").text == make_text(2)
    assert book.documents[-1].tags == ("manual",)
    assert len([document for document in book.documents if document.name == "one.txt"]) == 1


def test_a_large_addition_is_cut_into_segments(root: Path, library: Library) -> None:
    library.documents()  # opens the run
    config = library.run.config
    store = config.store.model_copy(update={"segment_tokens": 200})
    library.run.config = config.model_copy(update={"store": store})
    change = library.add_texts({f"n{number}": make_text(number, 2) for number in range(5)})
    assert len(change.added) == 5
    assert len(list((root / "added").iterdir())) > 1
    assert len(gnnlm.open(root).documents) == 8 + 5


@pytest.mark.parametrize(
    "changes", [{}, {"index": {"kind": "IVF4,Flat"}, "codec": {"kind": "pq", "bytes": 8, "train_rows": 1000}}]
)
def test_added_documents_predict_as_if_they_had_been_built(
    tiny_values: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A run with the documents in its corpus, and the same trained parts, gives the same log-probabilities."""
    texts = {split: write_texts(tmp_path / split, 5, 6, seed) for seed, split in enumerate(("train", "valid", "test"))}
    more = write_texts(tmp_path / "more", 3, 6, seed=7)
    for path in more.iterdir():
        path.rename(more / f"z-{path.name}")
    whole = Path(shutil.copytree(texts["train"], tmp_path / "whole"))
    shutil.copytree(more, whole, dirs_exist_ok=True)
    precise = {"store": {"dtype": "fp32"}, "cache": {"form": "projected", "dtype": "fp32"}, "tune": {"gate": False}}
    values = merge(merge(tiny_values, precise), changes)
    corpus = {"source": None, **{split: str(folder) for split, folder in texts.items()}}
    small = Run(parse_config(merge(values, {"run": str(tmp_path / "small"), "corpus": corpus})))
    small.build_all()
    Library(small.root).add(more)
    book = gnnlm.open(small.root)
    built = Run(
        parse_config(merge(values, {"run": str(tmp_path / "built"), "corpus": {**corpus, "train": str(whole)}}))
    )
    for stage in ("corpus", "encode"):
        built.build(stage)
    stream, encoded = built.snapshot.streams["train"], built.artifact("encode")
    assert stream.names == [document.name for document in book.documents]
    exact = changes.get("index") is None
    if exact:
        built.build("index")
        index = built.snapshot.index
    else:  # the same trained quantizer, filled with all rows
        from gnnlm.retrieval.faiss_build import TRAINED, fill_index
        from gnnlm.retrieval.faiss_index import open_faiss_index
        from gnnlm.retrieval.index import Rows, keys_of

        path, keys = tmp_path / "index.faiss", np.asarray(keys_of(encoded, "train"))
        fill_index(small.path("index") / TRAINED, keys, Rows.of(stream), "cosine", path)
        index = open_faiss_index(path, keys, Rows.of(stream), "cosine", small.config.index.probes)
    store = built.snapshot.encoded["train"]
    if not exact:
        from gnnlm.datastore.codec import QUANTIZER
        from gnnlm.datastore.quantize import CodedTable, Quantizer

        quantizer = Quantizer.from_tensors(small.artifact("codec").tensors(QUANTIZER))
        codes = quantizer.encode(np.asarray(encoded.parts[0].array("states.npy")))
        store = store.coded([CodedTable(torch.from_numpy(codes), quantizer)])
    from dataclasses import replace

    predictor = book.model.predictor
    graphs = replace(predictor.graphs, store=store)
    other = OpenBook(book.model.lm, store, index, replace(predictor, graphs=graphs, cache=None), book.model.reading)
    for text in ((more / "z-doc01.txt").read_text()[:150], (texts["test"] / "doc00.txt").read_text()[:150]):
        one, two = book.score(text), gnnlm.Book(other).score(text)
        for name in book.predictors:
            np.testing.assert_allclose(one.log_probs[name], two.log_probs[name], atol=1e-4, err_msg=name)


def test_probabilities_sum_to_one_and_look_at_nothing_to_come(root: Path, library: Library) -> None:
    library.add_texts({"new": make_text(1)})
    library.remove(library.documents()[0].name)
    book, text = gnnlm.open(root), make_text(1)[:60]
    for values in book.next(text).log_probs.values():
        assert np.exp(values.astype(np.float64)).sum() == pytest.approx(1, abs=1e-4)
    changed = book.score(text[:40] + "q" * 20)
    for name, values in book.score(text).log_probs.items():
        np.testing.assert_allclose(values[:40], changed.log_probs[name][:40], atol=1e-5)


# -- removing ----------------------------------------------------------------------------------------------------------


def test_what_is_removed_is_found_by_nothing(root: Path, library: Library) -> None:
    book = gnnlm.open(root)
    name = book.documents[2].name
    text = book.document(name).text
    assert name in found_in(book, text[:80])
    change = library.remove(name)
    assert (change.generation, change.removed) == (1, (name,))
    assert name in found_in(book, text[:80])  # still the generation that was opened
    book.refresh()
    found = book.neighbors(text[:80], k=16)
    assert name not in {near.document for line in found for near in line}
    assert {len(line) for line in found} == {16}  # as many real neighbours as before
    assert name not in {document.name for document in book.documents}
    with pytest.raises(CorpusError, match="no document of the store is named"):
        book.document(name)
    with pytest.raises(CorpusError, match="no document of the store is named"):
        book.score(text[:20], only=name)
    everything = book.neighbors(text[:40], k=8, only="*")
    assert name not in {near.document for line in everything for near in line}
    written = book.generate(text[:80], max_tokens=20, predictor="knn")
    assert name not in {source.document for token in written.tokens for source in token.sources}


def test_drafts_do_not_follow_removed_text(root: Path, library: Library) -> None:
    text = make_text(1)
    library.add_texts({"new": text})
    book = gnnlm.open(root)
    ids = book.model.lm.tokenize(text)[0]
    assert Drafter(book.model.store).stored(ids[:30]).tokens[:5] == ids[30:35]
    library.remove("new")
    book.refresh()
    assert Drafter(book.model.store).stored(ids[:30]).tokens[:5] != ids[30:35]
    assert (
        book.generate(text[:60], max_tokens=12, seed=3).text
        == book.generate(text[:60], max_tokens=12, seed=3, draft=False).text
    )


def test_a_store_with_a_document_removed_searches_as_one_without_it(root: Path, library: Library) -> None:
    """Positions differ, so documents and characters are compared."""
    name = library.documents()[1].name
    texts = {document.name: gnnlm.open(root).document(document.name).text for document in library.documents()}
    query = texts[name][:60]
    library.remove(name)
    masked = gnnlm.open(root).neighbors(query, k=8)
    library.compact()
    compacted = gnnlm.open(root).neighbors(query, k=8)
    for one, two in zip(masked, compacted, strict=True):
        np.testing.assert_allclose([n.similarity for n in one], [n.similarity for n in two], atol=1e-6)
        assert {(n.document, n.start) for n in one[:2]} == {(n.document, n.start) for n in two[:2]}


def test_names_globs_and_tags_name_documents(library: Library) -> None:
    library.add_texts({"a/1": make_text(1), "a/2": make_text(2), "b/1": make_text(3)}, tags=["x"])
    library.add_texts({"c": make_text(4)}, tags=["y"])
    assert library.remove("a/*").removed == ("a/1", "a/2")
    with pytest.raises(CorpusError, match="no document of the store is named 'a/1'"):
        library.remove(["b/1", "a/1"])
    assert "b/1" in {entry.name for entry in library.documents()}  # a change is made whole or not at all
    assert library.remove("tag:y").removed == ("c",)
    assert library.remove(["tag:x"]).removed == ("b/1",)


def test_not_every_document_can_be_removed(library: Library) -> None:
    with pytest.raises(CorpusError, match="would leave no document"):
        library.remove("*")
    assert current_number(library.run.root) == 0
    library.add_texts({"new": make_text(1)})
    library.remove("doc*")
    book = gnnlm.open(library.run.root)
    assert [document.name for document in book.documents] == ["new"]
    assert np.isfinite(book.score(make_text(1)[:50]).gnn_knn).all()


def test_what_was_removed_can_be_added_again(library: Library) -> None:
    library.add_texts({"new": make_text(1)})
    library.remove("new")
    assert library.add_texts({"new": make_text(1)}).added == ("new",)
    assert found_in(gnnlm.open(library.run.root), make_text(1)[:60]) & {"new"}


def test_removing_is_refused_where_later_states_have_read_the_text(write_config: WriteConfig) -> None:
    run = Run(load_config(write_config(lm={"continuous": True}, gnn={"layers": 0, "heads": 4, "context": 12})))
    run.build_all()
    library = Library(run.root)
    for change in (lambda: library.remove("doc*"), lambda: library.replace_texts({"doc00.txt": "x"})):
        with pytest.raises(ConfigError, match=r"under lm\.continuous the states of later documents"):
            change()
    with pytest.raises(ConfigError, match=r"erase: under lm\.continuous"):
        library.compact(erase=True)
    library.add_texts({"new": make_text(1)})
    assert found_in(gnnlm.open(run.root), make_text(1)[:60]) & {"new"}


# -- tags and filters --------------------------------------------------------------------------------------------------


def test_filters_by_tag_hold_in_the_index(root: Path, library: Library) -> None:
    library.add_texts({"one": make_text(1), "two": make_text(2)}, tags=["manual"])
    library.add_texts({"three": make_text(3)}, tags=["draft"])
    book = gnnlm.open(root)
    assert found_in(book, make_text(3)[:60], only="tag:manual") == {"one", "two"}
    assert "three" not in found_in(book, make_text(3)[:60], exclude="tag:d*")
    assert found_in(book, make_text(3)[:60], only=["tag:manual", "three"], exclude="one") <= {"two", "three"}
    with pytest.raises(CorpusError, match="'tag:none'"):
        book.score("ab", only="tag:none")


def test_tags_are_given_to_what_is_there(library: Library) -> None:
    base = library.documents()[0].name
    text = gnnlm.open(library.run.root).document(base).text
    change = library.add_texts({base: text}, tags=["old"])
    assert (change.generation, change.added) == (1, ())
    assert library.documents()[0].tags == ("old",)
    assert library.add_texts({base: text}, tags=["old"]).generation == 1


@pytest.mark.parametrize("tag", ["", " x", "a*", "a\nb"])
def test_a_tag_that_no_filter_could_name_is_refused(library: Library, tag: str) -> None:
    with pytest.raises(ConfigError, match="expected a tag such as manual"):
        library.add_texts({"new": make_text(1)}, tags=[tag])
    assert current_number(library.run.root) == 0


def test_texts_of_a_batch_have_filters_of_their_own(root: Path, library: Library) -> None:
    library.add_texts({"one": make_text(1)}, tags=["a"])
    library.add_texts({"two": make_text(2)}, tags=["b"])
    book = gnnlm.open(root)
    ids = book.model.lm.tokenize(make_text(1)[:30])[0]
    filters = [book.allowed("tag:a", None), book.allowed("tag:b", None), None]
    prediction, _ = book.model.read([ids] * 3, None, ("knn",), filters, k=4)
    names = [
        {book.model.store.names[int(book.model.store.document_of(p))] for p in line[line >= 0]}
        for line in prediction.neighbours.positions
    ]
    assert names[0] == {"one"}
    assert names[1] == {"two"}


# -- overlap -----------------------------------------------------------------------------------------------------------


def test_text_of_valid_or_test_is_reported(root: Path, library: Library) -> None:
    test = Run(load_config(root), reading=True).snapshot.streams["test"].documents[0].text
    change = library.add_texts({"leak": make_text(1) + "\n" + test, "clean": make_text(2)})
    assert change.overlapping == ("leak",)
    (segment,) = [each for each in library.history()[-1].segments if each.is_added]
    assert segment.overlapping == (0,)
    library.remove("clean")
    library.compact()
    (segment,) = [each for each in library.history()[-1].segments if "added" in each.name and each.documents == 1]
    assert segment.overlapping == (0,)


def test_the_current_generation_is_evaluated_without_what_overlaps(root: Path, library: Library) -> None:
    report = json.loads((root / "report" / "report.json").read_text())["rows"]
    built = library.evaluate()
    assert built.generation == 0
    for name, value in built.perplexity.items():
        assert value == pytest.approx(report[name]["ppl"], rel=1e-4)
    test = Run(load_config(root), reading=True).snapshot.streams["test"].documents
    library.add_texts({f"leak {number}": test[number].text for number in range(len(test))})
    leaked = library.evaluate()
    assert (leaked.generation, leaked.left_out) == (1, tuple(f"leak {number}" for number in range(len(test))))
    assert leaked.perplexity == pytest.approx(built.perplexity, rel=1e-4)
    book = gnnlm.open(root)
    assert book.score(test[0].text, predictors=["knn"]).perplexity() < 0.5 * built.perplexity["knn"]
    library.add_texts({"other": make_text(1)})
    library.remove(library.documents()[0].name)
    assert library.evaluate().perplexity["knn"] != pytest.approx(built.perplexity["knn"], rel=1e-6)
    assert library.evaluate().perplexity["base"] == pytest.approx(built.perplexity["base"], rel=1e-6)


# -- following a folder ------------------------------------------------------------------------------------------------


def test_a_folder_is_followed(library: Library, write: Write) -> None:
    folder = write(one=make_text(1), two=make_text(2))
    assert library.sync(folder).added == ("one.txt", "two.txt")
    assert library.sync(folder).generation == 1
    (folder / "one.txt").unlink()
    write(two=make_text(3), three=make_text(4))
    change = library.sync(folder)
    assert (set(change.added), set(change.removed)) == ({"two.txt", "three.txt"}, {"one.txt", "two.txt"})
    book = gnnlm.open(library.run.root)
    assert book.document("two.txt").text == make_text(3)
    assert len(book.documents) == 8 + 2  # nothing that is not of the folder has gone
    with pytest.raises(CorpusError):
        library.sync(write("empty"))
    with pytest.raises(CorpusError, match="is not a folder"):
        library.sync(folder / "two.txt")


def test_following_the_corpus_itself_adds_nothing_that_the_run_is_evaluated_on(
    library: Library, text_dir: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(text_dir, tmp_path / "corpus"))
    change = library.sync(folder)
    assert (change.added, change.removed) == ((), ())
    gone = library.documents()[0].name
    (folder / gone).unlink()
    assert library.sync(folder).removed == (gone,)


# -- rebuilding --------------------------------------------------------------------------------------------------------


def test_a_rebuild_does_not_silently_serve_old_segments(root: Path, library: Library) -> None:
    gone = library.documents()[0].name
    library.add_texts({"new": make_text(1), "gone": make_text(2)}, tags=["manual"])
    library.remove(["gone", gone])
    base = library.documents()[0].name
    library.add_texts({base: gnnlm.open(root).document(base).text}, tags=["old"])
    library.compact()
    states = Artifact.open(root / library.history()[-1].segments[-1].name / "states").fingerprint
    run = Run(load_config(root, ("cache.form=states",)))
    run.build_all(rebuild=True)
    for use in (lambda: gnnlm.open(root), lambda: Library(root).documents(), lambda: Library(root).remove("new")):
        with pytest.raises(ArtifactError, match=r"generation 4 .* was made with another cache, rebuilt since; .*renew"):
            use()
    change = Library(root).renew()
    assert change.generation == 5
    book = gnnlm.open(root)
    assert {document.name for document in book.documents if "old" in document.tags} == {base}
    names = [document.name for document in book.documents]
    assert "new" in names
    assert not {"gone", gone} & set(names)  # what was removed stays removed
    assert len(names) == len(set(names))
    assert book.documents[-1].tags == ("manual",)
    assert found_in(book, make_text(1)[:60]) & {"new"}
    assert Artifact.open(root / library.history()[-1].segments[-1].name / "states").fingerprint != states
    assert Library(root).renew().generation == 5


def test_a_copy_of_a_run_serves_the_same_and_a_fork_starts_as_built(
    root: Path, library: Library, tmp_path: Path
) -> None:
    library.add_texts({"new": make_text(1)})
    library.remove(library.documents()[0].name)
    Run(load_config(root), reading=True).copy(tmp_path / "copy")
    copied = gnnlm.open(tmp_path / "copy")
    assert [document.name for document in copied.documents] == [entry.name for entry in library.documents()]
    Run(load_config(root)).fork(load_config(root, (f"run={tmp_path / 'fork'}",)))
    assert len(gnnlm.open(tmp_path / "fork").documents) == 8


# -- killed writers ----------------------------------------------------------------------------------------------------


def test_what_a_killed_writer_left_is_removed_by_the_next(root: Path, library: Library, monkeypatch: Any) -> None:
    """Killed after all parts were made, before the commit."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gnnlm.library.transaction.commit", killed)
    with pytest.raises(KeyboardInterrupt):
        library.add_texts({"new": make_text(1)})
    monkeypatch.undo()
    assert (root / "added" / "0001.0" / "states").is_dir()
    assert len(gnnlm.open(root).documents) == 8
    change = library.add_texts({"other": make_text(2)})
    assert change.generation == 1
    assert [document.name for document in gnnlm.open(root).documents][8:] == ["other"]
    library.remove("other")
    library.compact()
    assert not (root / "added").exists()


def test_a_segment_that_a_reader_needs_stays(root: Path, library: Library) -> None:
    library.add_texts({"new": make_text(1)})
    book = gnnlm.open(root)
    library.remove("new")
    library.compact()
    assert (root / "added" / "0001.0").is_dir()
    assert "new" in found_in(book, make_text(1)[:60])
    book.refresh()
    library.compact()
    assert not (root / "added" / "0001.0").exists()


def test_a_session_keeps_the_generation_of_its_book(root: Path, library: Library) -> None:
    """The book moves on; what the session reads is leased until its block ends."""
    book = gnnlm.open(root)
    with book.attached([("memo", make_text(7))]) as session:
        library.add_texts({"new": make_text(1)})
        assert book.refresh()
        assert {lease.generation for lease in leases_of(root)} == {0, 1}
        assert "new" not in session
    assert {lease.generation for lease in leases_of(root)} == {1}
