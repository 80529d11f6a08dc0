"""The doctor and a store that has changed: added segments are checked, erased ones are named."""

from __future__ import annotations

from pathlib import Path

from gnnlm.config import load_config
from gnnlm.library.library import Library
from gnnlm.run import Run
from gnnlm.run.doctor import examine
from tests.library.conftest import make_text


def reading(root: Path) -> Run:
    return Run(load_config(root), reading=True)


def test_a_flipped_byte_in_an_added_segment_is_found(root: Path, library: Library) -> None:
    library.add_texts({"new": make_text(1)})
    assert examine(reading(root)).problems == []
    (states,) = root.glob("added/*/states/states.npy")
    data = bytearray(states.read_bytes())
    data[-3] ^= 1
    states.write_bytes(data)
    (problem,) = examine(reading(root)).problems
    assert str(states) in problem
    assert "gnnlm renew" in problem


def test_an_erased_base_segment_is_no_damage(root: Path, library: Library) -> None:
    library.remove(library.documents()[0].name)
    library.compact(erase=True)
    checkup = examine(reading(root))
    assert checkup.problems == []
    assert checkup.facts["erased"] == ["0000"]
    assert checkup.recall == {}  # there is nothing left to compare the index with
