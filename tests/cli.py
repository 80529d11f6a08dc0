"""Running the command line as a user does: as processes, which are forked from one with warm imports (warm.py)."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO


class Process:
    """A command, or a Python script with its arguments, that runs beside the test.

    Its output goes to files: nobody has to read along, and `output` and `errors` tell what it has said so far.
    """

    def __init__(self, program: str | Path, *arguments: str | Path | int, given: str = "", **environment: str) -> None:
        self.arguments = [str(program), *map(str, arguments)]
        self.returncode: int | None = None
        order = {
            "arguments": self.arguments,
            "folder": os.getcwd(),
            "environment": {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **environment},
        }
        files = [_file(json.dumps(order)), _file(given), _file(), _file()]
        self._stdout, self._stderr = files[2:]
        self._answers, theirs = socket.socketpair()
        with theirs:
            first, *streams = (file.fileno() for file in files)
            socket.send_fds(_warm(), [b"."], [first, theirs.fileno(), *streams])
        self._answers.settimeout(200)
        self.pid = self._answer()

    @property
    def output(self) -> str:
        return _text(self._stdout)

    @property
    def errors(self) -> str:
        return _text(self._stderr)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """The exit code, or None while it runs; -9 for one that was killed."""
        if self.returncode is None:
            self._answers.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self.returncode = self._answer()
        return self.returncode

    def wait(self, seconds: float = 200) -> int:
        """The exit code, once it has ended."""
        if self.returncode is None:
            self._answers.settimeout(seconds)
            try:
                self.returncode = self._answer()
            except TimeoutError:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"still running after {seconds} s: {self.arguments}\n{self.errors}") from None
        return self.returncode

    def _answer(self) -> int:
        """The next that is told of it: its number, then its exit code."""
        (number,) = struct.unpack("i", self._answers.recv(4))
        return int(number)

    def wait_until(self, happened: Callable[[], bool], seconds: float = 120) -> None:
        """Wait for something that it does while it runs."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.poll() is None, f"it ended before that: {self.errors}"
            assert time.monotonic() < deadline, f"it never got that far: {self.errors}"
            time.sleep(0.002)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


def gnnlm(*arguments: str | Path | int, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and check its exit code; no traceback may ever be printed."""
    return finished(Process("gnnlm", *arguments), code)


def gnnlm_cold(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command with no help: it must import all that it uses itself."""
    command = [sys.executable, "-m", "gnnlm", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def finished(process: Process, code: int = 0) -> subprocess.CompletedProcess[str]:
    """What a process said, after its end and a look at its exit code."""
    done = subprocess.CompletedProcess(process.arguments, process.wait(), process.output, process.errors)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def gnnlm_killed(*arguments: str | Path, journal: Path, step: int) -> None:
    """Start a command and kill -9 it as soon as its journal has got to a step."""
    with Process("gnnlm", *arguments) as process:
        process.wait_until(lambda: _step(journal) >= step)


def error_line(*arguments: str | Path) -> str:
    """The one line of a command that must fail."""
    done = gnnlm(*arguments, code=1)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.rstrip().endswith(lines[0])
    return lines[0]


@cache
def _warm() -> socket.socket:
    """Where the process takes its orders from which all others are forked; it ends with the tests."""
    ours, theirs = socket.socketpair()
    with theirs:
        script, number = Path(__file__).with_name("warm.py"), theirs.fileno()
        process = subprocess.Popen([sys.executable, str(script), str(number)], pass_fds=[number])
    atexit.register(process.wait)
    atexit.register(ours.close)  # comes first: handlers run in reverse
    return ours


def _file(text: str = "") -> IO[bytes]:
    """An unnamed file, at its beginning."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (it lasts as long as the process is looked at)
    file.write(text.encode())
    file.seek(0)
    return file


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


def _step(journal: Path) -> int:
    try:
        return int(json.loads(journal.read_text())["step"])
    except (FileNotFoundError, ValueError):
        return -1
