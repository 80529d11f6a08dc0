"""Errors of artifacts name the command that mends them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from gnnlm.errors import ArtifactError, Fault
from gnnlm.run.advice import rebuild_command


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("my run/store", "gnnlm run 'my run' --rebuild"),
        ("r/segments/0000/states", "gnnlm run r --rebuild"),
        ("r/added/0003.0/states", "gnnlm renew r"),
        ("r/refitted/0004/tune", "gnnlm refit r --part mix"),
        ("r/refitted/0004/cache", "gnnlm refit r --part gnn"),
        ("r/refitted/0004/segments/0002/index", "gnnlm refit r --part index"),
    ],
)
def test_the_command_depends_on_where_an_artifact_lies(place: str, command: str) -> None:
    assert rebuild_command(Path(place)) == command
    assert str(ArtifactError("it is damaged", Path(place), "damaged")) == f"it is damaged; rebuild it: {command}"


@pytest.mark.parametrize(
    ("fault", "place", "advice"),
    [
        ("missing", "r/store", "build it with gnnlm run"),
        ("missing", "r/refitted/0004/tune", "make it again: gnnlm refit r --part mix"),
        ("unreadable", "r/store", "delete r/store, if nothing in it is yours, and run again"),
        ("unreadable", "r/added/0003.0/text", "rebuild it: gnnlm renew r"),
        ("other inputs", "r/store", "discard it with --rebuild, or choose another run directory (run: in the config)"),
        ("no room", "r/store", "or choose another run directory (run: in the config)"),
    ],
)
def test_each_fault_has_its_advice(fault: Fault, place: str, advice: str) -> None:
    assert str(ArtifactError("it failed", Path(place), fault)) == f"it failed; {advice}"
    assert str(ArtifactError("it failed")) == "it failed"


def test_a_fault_survives_the_way_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(ArtifactError("it is damaged", Path("r/store"), "damaged")))
    assert str(error) == "it is damaged; rebuild it: gnnlm run r --rebuild"
