"""A run whose store has several segments: the same results as one, resumable one by one."""

from __future__ import annotations

import importlib
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnlm as package
from gnnlm.config import load_config, parse_config
from gnnlm.errors import ArtifactError
from gnnlm.retrieval.index import keys_of
from gnnlm.run import Run
from tests.cli import gnnlm, gnnlm_killed
from tests.conftest import WriteConfig, merge, write_texts

SIZE = 1200  # positions: the tiny corpus has 3,869 in eight documents
KINDS = ("text", "states", "codes", "index", "cache")


@pytest.fixture(scope="module")
def several(tiny_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    values = merge(tiny_values, {"store": {"segment_tokens": SIZE}})
    run = Run(parse_config({"run": str(tmp_path_factory.mktemp("runs") / "several"), **values}))
    run.build_all()
    return run


def parts_of(run: Path, kind: str) -> dict[str, bytes]:
    """The files of every segment's part of a kind, but for manifests, which hold times."""
    files = [path for path in sorted(run.glob(f"segments/*/{kind}/*")) if path.name != "manifest.json"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_segments_are_whole_documents(several: Run, tiny_run: Run) -> None:
    stream, one = several.snapshot.streams["train"], tiny_run.snapshot.streams["train"]
    assert len(stream.segments) == 4
    assert all(len(segment) <= SIZE for segment in stream.segments)
    assert np.array_equal(np.asarray(stream.tokens), np.asarray(one.tokens))
    assert np.array_equal(stream.starts, one.starts)
    assert stream.names == one.names
    assert list(stream.documents) == list(one.documents)
    assert stream.documents[-1] == one.documents[-1]
    assert np.array_equal(stream.places(), one.places())
    assert np.array_equal(stream.text(), one.text())


def test_several_segments_read_as_one(several: Run, tiny_run: Run) -> None:
    store, one = several.snapshot.store, tiny_run.snapshot.store
    positions = torch.arange(len(one))
    assert torch.equal(store.tokens(positions), one.tokens(positions))
    assert torch.equal(store.document_of(positions), one.document_of(positions))
    assert all(torch.equal(a, b) for a, b in zip(store.bounds(positions), one.bounds(positions), strict=True))
    torch.testing.assert_close(store.states(positions), one.states(positions), atol=2e-3, rtol=2e-3)
    text, other = several.snapshot.streams["train"], tiny_run.snapshot.streams["train"]
    for number in range(len(one.names)):
        assert store.document(number) == one.document(number) == text.document(number)
        ends = [0, 100, len(one.document(number)[0]) - 1, 10**6]
        assert [text.position_at(number, end) for end in ends] == [other.position_at(number, end) for end in ends]
    for position in range(0, len(one), 97):
        assert store.passage(position, 5, 4) == one.passage(position, 5, 4)
        if int(one.tokens(torch.tensor(position))) >= 0:
            assert store.characters(position) == one.characters(position)


def test_neighbours_tables_and_log_probs_are_those_of_one_segment(several: Run, tiny_run: Run) -> None:
    for split in ("train", "valid", "test"):
        one, found = (run.snapshot.searched(split).table for run in (tiny_run, several))
        np.testing.assert_allclose(found.similarity, one.similarity, atol=1e-3)
        assert (np.asarray(found.ids) == np.asarray(one.ids)).mean() > 0.99  # but for ties that rounding breaks
    for name in ("base", "knn", "gnn", "gnn_knn"):
        one, found = (run.artifact("eval").array(f"{name}.log_probs.npy") for run in (tiny_run, several))
        np.testing.assert_allclose(found, one, atol=5e-3, rtol=5e-3, err_msg=name)
        assert np.mean(found) == pytest.approx(np.mean(one), abs=2e-4)


def test_a_search_of_equal_keys_is_equal(several: Run, tiny_run: Run) -> None:
    queries = torch.from_numpy(np.array(keys_of(several.artifact("encode"), "train")[:300]))
    from gnnlm.retrieval.exact import ExactIndex
    from gnnlm.retrieval.index import Rows

    keys = np.asarray(keys_of(several.artifact("encode"), "train"))
    one = ExactIndex.over(keys, Rows.of(several.snapshot.streams["train"]).all(), "cosine").search(queries, 20)
    found = several.snapshot.index.search(queries, 20)
    assert torch.equal(one.positions, found.positions)
    assert torch.equal(one.similarity, found.similarity)


def test_a_continuous_text_is_read_across_segments(write_config: WriteConfig, tmp_path: Path) -> None:
    """The LM reads on from one segment to the next: the same windows, whatever the segments."""
    found = []
    for name, size in (("one", 10**6), ("several", SIZE)):
        store = {"segment_tokens": size, "dtype": "fp32", "shard_tokens": 100}
        config = load_config(write_config(run=str(tmp_path / name), lm={"continuous": True}, store=store))
        run = Run(config)
        for stage in ("corpus", "encode"):
            run.build(stage)
        found.append(np.asarray(keys_of(run.artifact("encode"), "train")))
    assert len(run.snapshot.streams["train"].segments) == 4
    np.testing.assert_allclose(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_a_book_reads_from_all_segments(several: Run) -> None:
    book = package.open(several.root)
    text = several.snapshot.streams["train"].documents[-1].text[:60]
    found = book.neighbors(text, k=4)
    assert any(near.document == several.snapshot.streams["train"].names[-1] for line in found for near in line)
    only = several.snapshot.streams["train"].names[0]
    assert {near.document for line in book.neighbors(text, k=4, only=only) for near in line} == {only}


def test_opening_reads_no_text_and_no_keys(several: Run) -> None:
    reader = Run(load_config(several.root), reading=True)
    reader.open_all()
    store, index = reader.snapshot.store, reader.snapshot.index
    assert len(store) == len(several.snapshot.store)
    assert len(index) == len(several.snapshot.index)
    read = {name for part in reader.artifact("corpus").parts for name in set(part.manifest.files) - part._unverified}
    assert read == {"tokens.npy", "starts.npy"}
    assert index.segment.cache_info().currsize == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "changes", [{"index": {"kind": "IVF4,Flat"}, "codec": {"kind": "pq", "bytes": 8, "train_rows": 1000}}]
)
def test_killed_in_the_second_segment_and_resumed(
    write_config: WriteConfig, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """kill -9 while the second of four segments is encoded: the first is kept, and all bytes are those of no kill."""
    changes = {**changes, "store": {"segment_tokens": SIZE, "shard_tokens": 64}}
    config = write_config(run=str(tmp_path / "killed"), **changes)
    run = tmp_path / "killed"
    gnnlm("corpus", config)
    journal = run / "segments" / "0001" / ".states.partial" / "journal.json"
    gnnlm_killed("encode", config, journal=journal, step=3)
    assert (run / "segments" / "0000" / ".states.partial" / "manifest.json").is_file()
    assert json.loads(gnnlm("status", config, "--json").stdout.splitlines()[-1])["encode"]["state"] == "half-done"
    first = (run / "segments" / "0000" / ".states.partial" / "states.npy").stat().st_mtime_ns
    assert "resuming" in gnnlm("encode", config).stderr
    assert (run / "segments" / "0000" / "states" / "states.npy").stat().st_mtime_ns == first
    straight = Run(load_config(write_config(run=str(tmp_path / "straight"), **changes)))
    for stage in ("corpus", "encode", "codec", "index"):
        straight.build(stage)
    for stage in ("codec", "index"):
        gnnlm(stage, write_config(run=str(run), **changes))
    for kind in KINDS[:4]:
        made = parts_of(run, kind)
        assert len({name.split("/")[1] for name in made}) == 4
        assert made == parts_of(straight.root, kind), kind
    assert not list(run.glob("segments/*/.*"))


def test_only_changed_segments_are_encoded_again(write_config: WriteConfig, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    store = {"segment_tokens": SIZE}
    config = load_config(write_config(corpus={"source": str(texts)}, store=store))
    run = Run(config)
    for stage in ("corpus", "encode"):
        run.build(stage)
    last = run.snapshot.streams["train"].names[-1]
    times = {path: path.stat().st_mtime_ns for path in sorted(run.root.glob("segments/*/states/states.npy"))}
    (texts / last).write_text((texts / last).read_text() + "\nbanana dolu.\n")
    run = Run(config)
    assert run.state(run.stages["corpus"]) == "stale"
    for stage in ("corpus", "encode"):
        run.build(stage, rebuild=True)
    again = [path for path, time in times.items() if path.stat().st_mtime_ns != time]
    assert again == [list(times)[-1]]
    whole = load_config(write_config(corpus={"source": str(texts)}, store={"segment_tokens": 10**6}))
    one = Run(whole)
    assert one.why(one.stages["corpus"], one.state(one.stages["corpus"])) == (
        f"store.segment_tokens was {SIZE}, is now 1000000"
    )
    one.build("corpus", rebuild=True)
    assert sorted(path.name for path in run.root.glob("segments/*/text")) == ["text"]
    one.build("encode", rebuild=True)
    assert [path.name for path in (run.root / "segments").iterdir()] == ["0000"]


def test_a_small_corpus_does_not_depend_on_the_size_of_segments(tiny_run: Run) -> None:
    store = tiny_run.config.store.model_copy(update={"segment_tokens": 5000})
    run = Run(tiny_run.config.model_copy(update={"store": store}))
    assert {run.state(stage) for stage in run.stages.values()} == {"done"}
    for size, same in ((5000, True), (SIZE, False)):  # as forks ask
        store = tiny_run.config.store.model_copy(update={"segment_tokens": size})
        fork = tiny_run.config.model_copy(update={"store": store, "run": "nowhere"})
        assert ("corpus" in tiny_run.kept_by(Run(fork, reading=True))) is same


def test_a_fork_and_a_copy_take_the_segments_along(several: Run, tmp_path: Path) -> None:
    kept = several.fork(load_config(several.root, (f"run={json.dumps(str(tmp_path / 'fork'))}", "gnn.layers=1")))
    assert "encode" in kept
    for kind in ("text", "states"):
        assert parts_of(tmp_path / "fork", kind) == parts_of(several.root, kind)
    several.copy(tmp_path / "copy")
    copied = Run(load_config(tmp_path / "copy"))
    assert {copied.state(stage) for stage in copied.stages.values()} == {"done"}
    assert (
        copied.bytes_of("encode")
        == several.bytes_of("encode")
        > sum(path.stat().st_size for path in several.path("encode").iterdir())
    )


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes a run of millions of rows of holes, for the benchmarks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("large")


def test_opening_a_large_run_reads_neither_texts_nor_states(tiny_run: Run, tmp_path: Path, large: Any) -> None:
    """All that is large is damaged: opening does not notice, and whoever reads it does."""
    rows = 1_500_000
    large.grow(tiny_run, tmp_path / "run", rows)
    damaged = ("states.npy", "layer0.npy", "index.faiss", "offsets.npy", "lines.npy", "documents.jsonl", "names.json")
    for name in damaged:
        (path,) = (tmp_path / "run" / "segments").glob(f"*/*/{name}")
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"damage")
    opened = Run(load_config(tmp_path / "run"), reading=True).open_current()
    store, index, cache = opened.store, opened.index, opened.cache
    assert (len(store), len(index)) == (rows, rows - rows // 1000)
    assert store.document_of(torch.tensor([0, 1000, rows - 1])).tolist() == [0, 1, rows // 1000 - 1]
    assert cache is not None
    middle = torch.tensor([rows // 2])
    for read in (
        lambda: store.states(middle),
        lambda: cache.tables[0][middle],
        lambda: index.search(torch.zeros(1, store.width), 1),
        lambda: store.characters(0),
        lambda: store.document(0),
        lambda: store.names,
    ):
        with pytest.raises(ArtifactError, match="was edited after it was made"):
            read()


@pytest.mark.slow
def test_ten_million_rows_open_without_being_read(tiny_run: Run, tmp_path: Path, large: Any) -> None:
    """Opening reads neither states nor index: little memory, and only the small files are verified."""
    rows = 10_000_000
    large.grow(tiny_run, tmp_path / "run", rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = Run(load_config(tmp_path / "run"), reading=True).open_current()
    store, index = parts.store, parts.index
    assert len(store) == rows
    assert len(index) == rows - rows // 1000
    positions = torch.tensor([0, 4_000_000, 9_999_999])
    assert store.document_of(positions).tolist() == [0, 4000, 9999]
    assert store.states(positions).shape == (3, 32)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes * 1024 < 4 * rows
    read = {name for part in parts.artifact("corpus").parts for name in set(part.manifest.files) - part._unverified}
    assert read == {"tokens.npy", "starts.npy"}
