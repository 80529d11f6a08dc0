"""What the benchmarks share: real neighbour rows, timing, memory measured in a separate process, and reporting."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from gnnlm.config import load_config
from gnnlm.errors import ConfigError
from gnnlm.run import Run


def arguments(about: str, run: str = "runs/demo") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--run", default=run, help="the run whose neighbour table is used (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # one measurement, in a separate process
    return parser


def open_run(path: str) -> Run:
    if not Path(path).is_dir():
        raise ConfigError(f"{path}: no such run; build one first (gnnlm demo), or name another with --run")
    return Run(load_config(Path(path)), reading=True)


def best_seconds(work: Callable[[], object], tries: int = 3, at_most: float = 8.0) -> float:
    """The fastest of several tries after a warm-up; fewer tries if they take long."""
    began = time.perf_counter()
    work()
    times = []
    while len(times) < tries and (not times or time.perf_counter() - began < at_most):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


class Took(NamedTuple):
    """Seconds that passed, and seconds of the processor, which other work on the machine hardly changes."""

    passed: float
    worked: float


class Clock:
    """Says how long things took, one after the other."""

    def __init__(self) -> None:
        self._at = Took(time.perf_counter(), time.process_time())

    def lap(self) -> Took:
        """What it took since the last lap."""
        before, self._at = self._at, Took(time.perf_counter(), time.process_time())
        return Took(self._at.passed - before.passed, self._at.worked - before.worked)


def took(work: Callable[[], object]) -> Took:
    clock = Clock()
    work()
    return clock.lap()


def peak_bytes() -> int:
    """The largest resident size this process has had."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would also count the parent's memory at the time it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_a_process(script: str, arguments: Sequence[str], child: dict[str, Any]) -> dict[str, Any]:
    """Run one measurement in a new process; returns its last line of output, parsed as JSON."""
    command = [sys.executable, script, *arguments, "--child", json.dumps(child)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{child}: {lines[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def machine() -> str:
    """The processor, and the threads and memory available."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        found = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")]
        name = found[0].split(":", 1)[1].strip() if found else name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{name}, {torch.get_num_threads()} threads, {memory:.0f} GB, torch {torch.__version__}"


def one_by_one(title: str, cases: Sequence[Any], measure: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure each case and print progress."""
    results = []
    for number, case in enumerate(cases, 1):
        began = time.perf_counter()
        results.append(measure(case))
        took = time.perf_counter() - began
        print(f"{title}: {number}/{len(cases)}, {case} took {took:.0f} s", file=sys.stderr, flush=True)
    return results


def report(
    title: str, cases: list[dict[str, Any]], as_json: bool, rows: list[dict[str, Any]] | None = None, **more: Any
) -> None:
    """One table, of `rows` where they are not the cases themselves, and one JSON object."""
    rows = rows or cases
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(shown(value) for value in row.values()))
    console = Console(width=200)
    console.print(machine(), highlight=False)
    console.print(table)
    for name, value in more.items():
        console.print(f"{name}: {value}", highlight=False)
    if as_json:
        print(json.dumps({"cases": cases, "machine": machine(), **more}), flush=True)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
