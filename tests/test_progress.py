"""The rate and the ETA of long work, also where other work comes in between."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from gnnlm import __version__, progress
from gnnlm.cli import terminal
from gnnlm.progress import Track, log_to, say, warn
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_other_work_does_not_count_for_the_rate(clock: Clock, logged: Callable[[], str]) -> None:
    with Track("train", 100, "tokens") as track:
        with track.paused():
            clock.now += 3600
        clock.now += 10
        track.later = 120.0
        track.advance(20)
        assert track.seconds == 10
        assert track.rate == 2
    lines = logged().splitlines()
    assert lines == ["train: 20/100 2 tokens/s ETA 2:40", "train: 20 tokens in 0:10 (2 tokens/s)"]


def test_a_brief_track_ends_without_a_word(clock: Clock, logged: Callable[[], str]) -> None:
    with Track("validation", 0, "tokens", brief=True) as track:
        track.total = 50
        track.advance(0)
        clock.now += 11
        track.advance(11)
    assert logged().splitlines() == ["validation: 11/50 1 tokens/s ETA 0:39"]


def test_a_bar_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one live display may be on the screen."""
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=screen, force_terminal=True, width=100))
    monkeypatch.setattr(progress, "make_bar", terminal.LiveBar)
    with Track("outer", 10, "tokens") as outer:
        assert isinstance(outer._bar, terminal.LiveBar)
        outer.advance(1, note="first")
        with outer.paused():
            assert not outer._bar.display.live.is_started
            with Track("inner", 10, "tokens") as inner:
                inner.advance(10)
        assert outer._bar.display.live.is_started
        outer.advance(9, note="last")
        outer._bar.display.refresh()
    assert "inner" in screen.getvalue()
    assert "last" in screen.getvalue()


def test_a_library_prints_nothing(capfd: pytest.CaptureFixture[str], logged: Callable[[], str]) -> None:
    say("one")
    warn("two")
    assert logged() == "one\nwarning: two"
    assert capfd.readouterr() == ("", "")


def test_a_handler_of_ones_own_gets_the_records(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gnnlm"):
        say("fine, at 100%")
        warn("not fine")
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("gnnlm", "WARNING", "not fine")
    ]


def test_the_log_of_a_run(tmp_path: Path, logged: Callable[[], str]) -> None:
    """Each line has its time; while another run is built, its messages are in its log alone."""
    with log_to(tmp_path / "one"):
        say("first\nsecond")
        with suppress(ValueError), log_to(tmp_path / "two"):
            warn("inner")
            raise ValueError("wrong")
        say("last")
    say("after")
    found = {name: [line[20:] for line in (tmp_path / name).read_text().splitlines()] for name in ("one", "two")}
    begins = f"gnnlm {__version__} starts building"
    assert found == {
        "one": [begins, "first", "second", "last"],
        "two": [begins, "warning: inner", "stopped by ValueError: wrong"],
    }
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", (tmp_path / "one").read_text())
    assert logged().splitlines() == ["first", "second", "warning: inner", "last", "after"]
