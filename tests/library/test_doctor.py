"""The doctor and a store that has changed: what is served is checked, and whether what was trained still fits it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnnlm.config import load_config
from gnnlm.library.library import Library
from gnnlm.run import Run
from gnnlm.run.doctor import examine
from tests.cli import gnnlm
from tests.library.conftest import make_text
from tests.library.test_commands import last


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
    assert set(checkup.recall.values()) == {1.0}  # of the segments that are served
    assert set(checkup.facts["perplexity"]) == {"base", "knn", "gnn", "gnn_knn"}


@pytest.mark.parametrize("file", ["states/states.npy", "cache/manifest.json", "text/documents.jsonl"])
def test_a_damaged_added_segment_is_made_again(root: Path, library: Library, file: str) -> None:
    """By the command that the doctor names; where its text is damaged, it is lost, and the rest is served."""
    base = len(library.documents())
    library.add_texts({"new": make_text(1), "gone": make_text(2)}, tags=["t"])
    library.remove("gone")
    library.add_texts({"other": make_text(3)})
    damaged = root / "added" / "0001.0" / file
    damaged.write_bytes(damaged.read_bytes()[:-2])
    assert "gnnlm renew" in examine(reading(root)).problems[0]
    change = Library(root).renew()
    lost = file.startswith("text")
    assert change.added == (() if lost else ("new",))
    assert examine(reading(root)).problems == []
    found = {entry.name: entry.tags for entry in Library(root).documents()[base:]}
    assert found == ({"other": ()} if lost else {"new": ("t",), "other": ()})
    assert Library(root).renew().generation == change.generation


def test_a_store_that_was_mostly_replaced_has_drifted(root: Path, library: Library) -> None:
    base = [entry.name for entry in library.documents()]
    library.add_texts({"new": make_text(1, 2)})
    first = last("doctor", root)
    assert first["ok"]
    assert first["drift"]["generation"] == 1
    assert [first["drift"][part]["refit"] for part in ("mix", "gnn")] == [False, False]
    assert 0 < first["drift"]["gnn"]["unseen"] < 0.1
    library.add_texts({f"n{number}": make_text(number, 20) for number in range(2, 6)})
    library.remove(base[1:])
    shown = gnnlm("doctor", root, "--json").stdout
    found = json.loads(shown.splitlines()[-1])
    assert found["ok"]  # drift is advice
    assert found["drift"]["mix"].keys() == {"refit", "then", "now", "anew"}
    assert found["drift"]["mix"]["now"].keys() == {"knn", "gnn_knn"}
    assert found["drift"]["mix"]["now"]["knn"] > found["drift"]["mix"]["anew"]["knn"]
    assert found["drift"]["gnn"].keys() == {"refit", "then", "now", "unseen"}
    assert found["drift"]["gnn"]["now"] < found["drift"]["gnn"]["then"]
    assert found["drift"]["gnn"]["unseen"] > 0.8
    for part in ("mix", "gnn"):
        assert found["drift"][part]["refit"]
        assert f"gnnlm refit {root} --part {part}" in shown
    library.refit("gnn")  # and with it the mix
    after = examine(reading(root))
    assert [each.refit for each in after.drift] == [False, False]
    assert after.drift[0].figures["now"] == pytest.approx(found["drift"]["mix"]["anew"], abs=0.2)
    assert after.drift[1].figures["unseen"] == 0
    assert after.drift[1].figures["now"] == pytest.approx(after.drift[1].figures["then"], abs=1e-2)


def test_a_run_as_it_was_built_has_not_drifted(root: Path) -> None:
    assert last("doctor", root)["drift"] == {"generation": 0}


def test_a_flipped_byte_in_what_was_refitted_is_found(root: Path, library: Library) -> None:
    library.add_texts({"new": make_text(1)})
    library.refit("mix")
    tuning = root / "refitted" / "0002" / "tune" / "tuning.json"
    tuning.write_text(tuning.read_text().replace("0", "1", 1))
    (problem,) = examine(reading(root)).problems
    assert str(tuning) in problem
    assert f"gnnlm refit {root} --part mix" in problem
    assert Library(root).refit("mix").stages == ("tune",)  # the command mends it
    assert examine(reading(root)).problems == []
    assert Library(root).refit("mix").stages == ()
