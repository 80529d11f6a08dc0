"""The rate and the ETA of long work, also where other work comes in between."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gnnlm import progress
from gnnlm.progress import Track
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_other_work_does_not_count_for_the_rate(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Track("train", 100, "tokens") as track:
        with track.paused():
            clock.now += 3600
        clock.now += 10
        track.later = 120.0
        track.advance(20)
        assert track.seconds == 10
        assert track.rate == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["train: 20/100 2 tokens/s ETA 2:40", "train: 20 tokens in 0:10 (2 tokens/s)"]


def test_a_brief_track_ends_without_a_word(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Track("validation", 0, "tokens", brief=True) as track:
        track.total = 50
        track.advance(0)
        clock.now += 11
        track.advance(11)
    assert capsys.readouterr().err.splitlines() == ["validation: 11/50 1 tokens/s ETA 0:39"]


def test_a_bar_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one live display may be on the screen."""
    screen = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=screen, force_terminal=True, width=100))
    with Track("outer", 10, "tokens") as outer:
        assert outer._live is not None
        outer.advance(1, note="first")
        with outer.paused():
            assert not outer._live.live.is_started
            with Track("inner", 10, "tokens") as inner:
                inner.advance(10)
        assert outer._live.live.is_started
        outer.advance(9, note="last")
        outer._live.refresh()
    assert "inner" in screen.getvalue()
    assert "last" in screen.getvalue()
