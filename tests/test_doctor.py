"""A doctor that finds what is wrong with a run, and nothing where nothing is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnlm.artifact import blocks, write_json
from gnnlm.artifact.blocks import file_entry
from gnnlm.artifact.manifest import MANIFEST, read_manifest
from gnnlm.config import parse_config
from gnnlm.retrieval import faiss_build
from gnnlm.retrieval.search import Queries
from gnnlm.run import Run
from gnnlm.run.doctor import examine
from tests.cli import gnnlm
from tests.conftest import merge
from tests.evaluate.analysis.copies import copied_run

INVERTED = {"kind": "ivf", "clusters": 12, "probes": 6}


def searched_run(run: Run, folder: Path, **changes: Any) -> Run:
    """The tiny run up to its tables, with changes; nothing is built on them."""
    config = parse_config(merge(run.config.model_dump(mode="json"), {"run": str(folder / "run"), **changes}))
    run.fork(config)
    made = Run(config)
    for name in ("corpus", "encode", "codec", "index", "search"):
        made.build(name)
    return made


def opened(run: Run) -> Run:
    return Run(run.config, reading=True)


@contextmanager
def edited(folder: Path, name: str) -> Iterator[Any]:
    """An array of an artifact, to be changed; its manifest is written anew, as if it had been made like that."""
    array = np.load(folder / name, mmap_mode="r+")
    yield array
    array.flush()
    manifest = read_manifest(folder)
    manifest.files[name] = file_entry(folder / name)
    write_json(folder / MANIFEST, manifest.as_json())


def test_a_whole_run(tiny_run: Run, tmp_path: Path) -> None:
    run = copied_run(tiny_run, tmp_path, index=INVERTED)
    found = json.loads(gnnlm("doctor", run.root, "--json").stdout.strip().splitlines()[-1])
    assert found["ok"]
    assert found["problems"] == []
    assert list(found["recall"]) == ["1", "10", "128", "1024"]
    assert all(0.5 < value <= 1 for value in found["recall"].values())
    assert [list(segment) for segment in found["segments"]] == [["1", "10", "128", "1024"]]
    assert all(abs(cost["own"] / cost["exact"] - 1) < 0.05 for cost in found["perplexity"].values())
    report = (run.root / "report" / "report.md").read_text()
    assert "Index: ivf over" in report
    assert "12 clusters" not in report
    assert "6 clusters searched" in report


def test_exact_search_finds_what_is_in_the_tables(tiny_run: Run) -> None:
    found = examine(opened(tiny_run))
    assert found.ok, found.problems
    assert set(found.recall.values()) == {1.0}
    for name, cost in found.facts["perplexity"].items():
        assert cost["own"] == pytest.approx(cost["exact"], rel=1e-6), name


def test_a_flipped_byte_in_a_large_file_of_the_same_time(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LARGE", 1000)  # and the run has no blocks, as one made before there were any
    run = searched_run(tiny_run, tmp_path)
    path = run.root / "segments" / "0000" / "states" / "states.npy"
    content, times = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.unlink()  # it is shared with the run that it was forked from
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    opened(run).artifact("search").verify()  # large files are trusted by their size and time
    found = examine(opened(run))
    assert len(found.problems) == 1
    assert "states.npy was edited after it was made (its checksum differs); rebuild it: " in found.problems[0]


def test_an_index_of_other_keys(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(keys: Any, positions: Any, metric: str) -> Any:
        made = np.random.default_rng(len(positions)).normal(size=(len(positions), keys.shape[1])).astype(np.float32)
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    with monkeypatch.context() as patch:
        patch.setattr(faiss_build, "_keys", other)
        run = searched_run(tiny_run, tmp_path, index=INVERTED)
    found = examine(opened(run))
    assert any("of its rows by their own keys: it was made from other keys" in problem for problem in found.problems)
    assert found.recall["10"] < 0.5


def test_a_leaked_position(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Queries, "allowed", lambda self, positions, places: None)
        run = searched_run(tiny_run, tmp_path, search={"k": 12})  # searched anew
    (problem,) = examine(opened(run)).problems
    assert "neighbours of train positions are barred by the leakage rule; search again" in problem


def swapped(ids: Any, similarity: Any) -> None:
    similarity[3, :2] = similarity[3, 1::-1] + [0.0, 1.0]


def outside(ids: Any, similarity: Any) -> None:
    ids[0, 0] = 10**6


def the_end_of_a_document(ids: Any, similarity: Any) -> None:
    ids[0, 0] = END[0]


def no_number(ids: Any, similarity: Any) -> None:
    similarity[:, 0] = np.inf


END = [0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swapped, "1 neighbours of valid positions are not sorted"),
        (outside, "1 neighbours of valid positions are not in the store"),
        (the_end_of_a_document, "1 neighbours of valid positions have no token"),
        (no_number, "have a similarity that is no number"),
    ],
)
def test_a_wrong_table(change: Callable[..., None], words: str, tiny_run: Run, tmp_path: Path) -> None:
    run = searched_run(tiny_run, tmp_path, search={"k": 12})
    END[0] = int(run.snapshot.streams["train"].starts[1]) - 1
    folder = run.root / "search"
    with edited(folder, "valid.ids.npy") as ids, edited(folder, "valid.similarity.npy") as similarity:
        change(ids, similarity)
    found = examine(opened(run))
    assert any(words in problem for problem in found.problems), found.problems


def test_a_run_without_an_index(tiny_run: Run, tmp_path: Path) -> None:
    config = parse_config(merge(tiny_run.config.model_dump(mode="json"), {"run": str(tmp_path / "run")}))
    made = Run(config)
    made.build("corpus")
    done = gnnlm("doctor", tmp_path / "run", code=1)
    assert "has no index yet; build the run first" in done.stdout
