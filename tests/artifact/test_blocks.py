"""Digests of blocks: damage is seen in what is read, when it is read, and nothing else is read for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.artifact import Artifact, CheckedArray, Draft, blocks
from gnnlm.config import load_config
from gnnlm.datastore.checked import CheckedTensor
from gnnlm.datastore.store import mapped
from gnnlm.errors import ArtifactError
from gnnlm.run import Run

ROWS, WIDTH, BLOCK = 500, 6, 256


@pytest.fixture(autouse=True)
def _every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LARGE", 0)
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)


def make(path: Path) -> Path:
    with Draft(path, "encode", {}) as draft:
        draft.save("rows.npy", np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH))
        draft.write_text("words.txt", "many words " * 100)
        draft.finish({})
    return path


def flip(file: Path, place: int) -> None:
    """Change one byte of a file and leave its time as it was."""
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 4]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def rows_of_block(place: int) -> set[int]:
    """The rows with a byte in the same block as this byte of the file; the array begins at byte 128."""
    first = place // BLOCK * BLOCK
    return {(byte - 128) // (4 * WIDTH) for byte in range(max(128, first), min(first + BLOCK, 128 + ROWS * WIDTH * 4))}


@given(
    place=st.integers(BLOCK, 127 + ROWS * WIDTH * 4),
    rows=st.lists(st.integers(-ROWS, ROWS - 1), min_size=1, max_size=8),
    kind=st.sampled_from(["array", "tensor", "select", "slice", "number"]),
)
def test_damage_is_seen_in_what_is_read_and_there_alone(
    tmp_path_factory: pytest.TempPathFactory, place: int, rows: list[int], kind: str
) -> None:
    path = make(tmp_path_factory.mktemp("x") / "x")
    flip(path / "rows.npy", place)
    array = Artifact.open(path).array("rows.npy")
    assert isinstance(array, CheckedArray)
    whole = np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)
    low, high = sorted(row % ROWS for row in (rows[0], rows[-1]))
    reads: dict[str, Any] = {
        "array": (lambda: array[np.array(rows)], rows),
        "tensor": (lambda: mapped(array)[torch.tensor(rows)].numpy(), rows),
        "select": (lambda: mapped(array).index_select(0, torch.tensor(rows) % ROWS).numpy(), rows),
        "slice": (lambda: array[low : high + 1], range(low, high + 1)),
        "number": (lambda: array[rows[0]][None], rows[:1]),
    }
    read, wanted = reads[kind]
    if {row % ROWS for row in wanted} & rows_of_block(place):
        with pytest.raises(ArtifactError, match=r"rows\.npy was edited .*bytes .* have changed.*--rebuild"):
            read()
    else:
        found = read()
        assert type(found) is np.ndarray
        assert found.tolist() == whole[[row % ROWS for row in wanted]].tolist()
    with pytest.raises(ArtifactError, match=r"rows\.npy was edited"):
        np.asarray(array)
    with pytest.raises(ArtifactError, match=r"rows\.npy was edited"):
        mapped(array).float().sum()


def test_a_complete_check_reads_every_byte(tmp_path: Path) -> None:
    path = make(tmp_path / "x")
    opened = Artifact.open(path)
    opened.verify(trust=False)
    assert opened.array("rows.npy")[3].tolist() == [18, 19, 20, 21, 22, 23]
    flip(path / "rows.npy", 9000)
    opened.verify()  # left to its blocks
    with pytest.raises(ArtifactError, match=r"rows\.npy was edited after it was made \(its checksum differs\)"):
        opened.verify(trust=False)
    with pytest.raises(ArtifactError, match=r"rows\.npy was edited"):
        Artifact.open(path, trust=False)


def test_what_is_read_whole_is_checked_whole(tmp_path: Path) -> None:
    path = make(tmp_path / "x")
    flip(path / "words.txt", 1000)
    opened = Artifact.open(path)
    for read in (opened.text, opened.bytes, opened.file):
        with pytest.raises(ArtifactError, match=r"words\.txt was edited"):
            read("words.txt")


def test_a_block_is_read_for_its_check_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = Artifact.open(make(tmp_path / "x")).array("rows.npy")
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda number, size, place: read.append(place) or pread(number, size, place))
    for _ in range(3):
        array[np.array([0, 499, 0])]
    assert read == [12032]  # the first block was checked with the header
    np.asarray(array)
    assert sorted(read) == sorted({*read}) == list(range(256, 12128, 256))


def test_a_tensor_of_a_checked_array_stays_one_where_nothing_is_read(tmp_path: Path) -> None:
    path = make(tmp_path / "x")
    flip(path / "rows.npy", 9000)
    tensor = mapped(Artifact.open(path).array("rows.npy"))
    assert isinstance(tensor, CheckedTensor)
    assert (len(tensor), tensor.shape, tensor.dtype, tensor.ndim) == (ROWS, (ROWS, WIDTH), torch.int32, 2)
    assert tensor.to("cpu") is tensor
    assert type(tensor[5]) is torch.Tensor
    reads: list[Callable[[], Any]] = [
        lambda: tensor + 1,
        lambda: torch.cat([tensor, tensor]),
        lambda: tensor.to(torch.int64),
        tensor.tolist,
    ]
    for read in reads:
        with pytest.raises(ArtifactError, match="was edited"):
            read()


def test_a_whole_run_is_built_and_read_by_blocks(tiny_values: dict[str, Any], tmp_path: Path, tiny_run: Run) -> None:
    """Every file is large: all that reads an array does so through its blocks, and finds what it found without."""
    from gnnlm.book import open_book
    from gnnlm.config import parse_config

    run = Run(parse_config({"run": str(tmp_path / "run"), **tiny_values}))
    run.build_all()
    for name in run.stages:
        assert run.artifact(name).fingerprint == tiny_run.artifact(name).fingerprint or name in ("eval", "cache"), name
    text = "ban dor kisha luto mev"
    book, other = open_book(tmp_path / "run"), open_book(tiny_run.root)
    assert book.score(text).gnn_knn.tolist() == other.score(text).gnn_knn.tolist()
    states = tmp_path / "run" / "segments" / "0000" / "states" / "states.npy"
    flip(states, states.stat().st_size - 1)
    store = Run(load_config(tmp_path / "run"), reading=True).snapshot.store
    store.states(torch.arange(1000))
    with pytest.raises(ArtifactError, match=r"states\.npy was edited"):
        store.states(torch.tensor([len(store) - 1]))
