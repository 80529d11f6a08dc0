"""Running the command line as a user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-c", "from gnnlm.cli import main; main()"]


def gnnlm(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and check its exit code; no traceback may ever be printed."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=200, env=_environment()
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def gnnlm_killed(*arguments: str | Path, journal: Path, step: int) -> None:
    """Start a command and kill -9 it as soon as its journal has got to a step."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()
    )
    deadline = time.monotonic() + 120
    while _step(journal) < step:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline, "it never got that far"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


def error_line(*arguments: str | Path) -> str:
    """The one line of a command that must fail."""
    done = gnnlm(*arguments, code=1)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.rstrip().endswith(lines[0])
    return lines[0]


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def _step(journal: Path) -> int:
    try:
        return int(json.loads(journal.read_text())["step"])
    except (FileNotFoundError, ValueError):
        return -1
