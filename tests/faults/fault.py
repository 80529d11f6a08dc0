"""Running a command with a fault at its n-th change on the disk.

The command runs in a process forked from the tests', which has imported everything: a point costs no more than the
command itself.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gnnlm.artifact import disk
from tests.faults.power import MODES, Power

LIBRARIES = (
    "faiss",
    "gnnlm.cli.commands",
    "gnnlm.evaluate.evaluation",
    "gnnlm.library.library",
    "gnnlm.predict.cache_build",
    "gnnlm.predict.window_cache",
    "gnnlm.retrieval.faiss_index",
    "gnnlm.retrieval.search",
    "gnnlm.train.finetune",
    "gnnlm.train.train_gnn",
    "gnnlm.evaluate.tune",
    "matplotlib.figure",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
GROWS = ("create", "write", "make directory", "link", "rename")  # what a full disk refuses
KINDS = ("full", "input/output error", "not allowed", "kill", *(f"power: {mode}" for mode in MODES))


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th change, counted from 1. Its words replay it."""

    kind: str
    n: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.n}/{self.seed}"


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code (-9 if it was killed), its words, and how many changes it made."""

    code: int
    output: str
    errors: str
    changes: int

    @property
    def error(self) -> str:
        """Its last line, which must be the only one that speaks of an error."""
        lines = [line for line in self.errors.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.errors
        assert self.errors.rstrip().endswith(lines[0]), self.errors
        return lines[0]


class Watch:
    """Counts changes, and does what a fault says at its n-th."""

    def __init__(self, root: Path, fault: Fault | None) -> None:
        self.count, self._fault = 0, fault
        powered = fault is not None and fault.kind.startswith("power")
        self._power = Power(root) if powered else None

    def __call__(self, change: disk.Change, path: Path) -> None:
        self.count += 1
        fault = self._fault
        if fault is not None and self.count >= fault.n:
            self._strike(fault, change, path)
        if self._power is not None:
            self._power.about_to(change, path)

    def _strike(self, fault: Fault, change: disk.Change, path: Path) -> None:
        if fault.kind == "full" and change in GROWS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if fault.kind == "not allowed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if fault.kind == "input/output error" and self.count == fault.n:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if self._power is not None:
            self._power.cut(fault.kind.split(": ")[1], random.Random(fault.seed))  # type: ignore[arg-type]
        if fault.kind == "kill" or self._power is not None:
            os.kill(os.getpid(), signal.SIGKILL)


def import_all() -> None:
    """Import what commands use, so that a fork has it."""
    for name in LIBRARIES:
        importlib.import_module(name)


@dataclass(frozen=True)
class Signal:
    """A signal that the command gets after some seconds, unless it has ended."""

    number: int
    seconds: float


def command(root: Path, *arguments: str | Path, fault: Fault | None = None, signalled: Signal | None = None) -> Ended:
    """Run a `gnnlm` command in a fork."""
    return forked(partial(run_command, arguments), root, fault, signalled)


def run_command(arguments: Sequence[str | Path]) -> None:
    """Run a `gnnlm` command in this process."""
    from gnnlm.cli import main

    sys.argv = ["gnnlm", *map(str, arguments)]
    main()


def forked(work: Callable[[], Any], root: Path, fault: Fault | None = None, signalled: Signal | None = None) -> Ended:
    """Do some work in a fork with a fault in the changes that it makes."""
    child = Child(work, root, fault)
    if signalled is not None:
        child.wait(signalled.seconds)
        child.send(signalled.number)
    return child.ended()


class Child:
    """Some work in a fork, beside the tests."""

    def __init__(self, work: Callable[[], Any], root: Path, fault: Fault | None = None) -> None:
        self._said = Path(tempfile.mkdtemp(prefix="said", dir=root.parent))
        sys.stdout.flush()
        sys.stderr.flush()
        self._number, self._status = os.fork(), None
        if self._number == 0:
            _child(work, root, self._said, fault)

    _status: int | None

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for its end, but no longer than this; whether it has ended."""
        began = time.monotonic()
        while self._status is None:
            number, status = os.waitpid(self._number, os.WNOHANG)
            if number:
                self._status = status
            elif time.monotonic() - began < seconds:
                time.sleep(0.002)
            else:
                return False
        return True

    def send(self, number: int) -> None:
        if not self.wait(0):
            os.kill(self._number, number)

    def ended(self) -> Ended:
        """Wait for its end, and tell of it."""
        self.wait()
        assert self._status is not None
        out, err, changes = (self._read(name) for name in ("out", "err", "changes"))
        shutil.rmtree(self._said)
        return Ended(os.waitstatus_to_exitcode(self._status), out, err, int(changes or -1))

    def _read(self, name: str) -> str:
        path = self._said / name
        return path.read_text() if path.exists() else ""


def _child(work: Callable[[], Any], root: Path, place: Path, fault: Fault | None) -> None:
    """Never returns."""
    code = 1
    try:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        for name, stream in (("out", 1), ("err", 2)):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own clock
        os.environ["COLUMNS"] = "200"
        watch = Watch(root, fault)
        disk.watch = watch
        try:
            work()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        finally:
            disk.watch = None
            (place / "changes").write_text(json.dumps(watch.count))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for open_stream in (sys.stdout, sys.stderr):
            open_stream.flush()
        os._exit(code)
