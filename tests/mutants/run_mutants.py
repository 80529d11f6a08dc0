"""Plant bugs, one at a time, and check that the test named for each fails.

    python -m tests.mutants.run_mutants                 # all of them, after the named tests have passed without any
    python -m tests.mutants.run_mutants leakage fsync   # those whose names contain a word
    python -m tests.mutants.run_mutants --draw 10 --seed 3

Each mutant of `mutants.py` replaces one piece of the source in a copy of `src`; only its test runs, against the copy.
A mutant whose text is not found exactly once is an error: adapt it to the source as it is now. The exit code is 0 if
every mutant was caught.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # a mutant that loops forever is caught by this
FAILED = 1  # pytest's exit code if tests ran and some failed; other codes mean that the test itself is broken


def mutated(mutant: Mutant) -> str:
    """The text of the mutant's file with its replacement; raises ValueError if the text to replace is not there."""
    path = ROOT / "src" / "gnnlm" / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.file} has the text to replace {text.count(mutant.old)} times, not once"
        )
    return text.replace(mutant.old, mutant.new)


def run_tests(source: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests of this tree against a copy of its source."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)


def verdict(mutant: Mutant) -> str:
    """Run the test of a mutant: `caught`, `MISSED`, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        (source / "gnnlm" / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        try:
            done = run_tests(source, [mutant.test])
        except subprocess.TimeoutExpired:
            return "caught (it never ended)"
    if done.returncode == FAILED:
        return "caught"
    return "MISSED" if done.returncode == 0 else f"BROKEN TEST\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def timed_verdict(mutant: Mutant) -> str:
    began = time.monotonic()
    found = verdict(mutant)
    print(f"{mutant.name}: {found} ({time.monotonic() - began:.0f} s, {mutant.test})", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="run the mutants whose names contain one of these words")
    parser.add_argument("--draw", type=int, metavar="N", help="run only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the draw (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at once (default: %(default)s)")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a mutant first")
    given = parser.parse_args()

    chosen = [one for one in MUTANTS if not given.words or any(word in one.name for word in given.words)]
    if given.draw is not None:
        chosen = random.Random(given.seed).sample(chosen, min(given.draw, len(chosen)))
    wrong = []
    for mutant in chosen:
        try:
            mutated(mutant)
        except ValueError as error:
            wrong.append(str(error))
    if wrong or not chosen:
        print("\n".join(wrong) or "no mutant has such a name")
        return 2
    if not given.trust:
        plain = run_tests(ROOT / "src", sorted({mutant.test for mutant in chosen}))
        if plain.returncode:
            print(f"the tests fail without any mutant:\n{plain.stdout[-3000:]}{plain.stderr[-2000:]}")
            return 2
    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(timed_verdict, chosen))
    caught = sum(one.startswith("caught") for one in found)
    print(f"{caught} of {len(chosen)} mutants caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
