"""Whether the defaults of training serve unlike corpora: one value changed at a time, perplexity on valid.

    .venv/bin/python benchmarks/defaults.py --run RUN [--run RUN ...] [--forks FOLDER] [--steps 150] [--json]

Each change is a fork of the run under FOLDER (default: `runs/defaults`), trained with the same budget and kept: an
interrupted sweep goes on where it stopped. All steps have k = 32 and 256 tokens. A case gives the change of perplexity
against base on the first 4,096 tokens of valid, after the last step, in percent. Test is not looked at.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from common import one_by_one, open_run, report

from gnnlm.evaluate.analysis.components import Variant
from gnnlm.run.forks import Forks

VALID = 4096  # tokens
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "train.lr 2.5e-4": {"train.lr": 2.5e-4},
    "train.lr 1e-3": {"train.lr": 1e-3},
    "gnn.dropout 0": {"gnn.dropout": 0.0},
    "gnn.dropout 0.3": {"gnn.dropout": 0.3},
    "gnn.context 32": {"gnn.context": 32},
    "gnn.context 256": {"gnn.context": 256},
}


def valid_change(forks: Forks, name: str) -> float:
    """Train the fork of a change, or find it trained; the change of valid's perplexity, in percent."""
    k = min(32, forks.run.graph_k)
    budget = {"train.curriculum": [{"k": k, "steps": forks.steps}], "train.batch_blocks": 2}
    budget |= {"train.validate_every": forks.steps, "train.valid_tokens": VALID}
    variant = Variant(name.replace(" ", "-"), "", name, {**budget, **CHANGES[name]})
    history = json.loads(forks.fork(variant).build("train").text("history.json"))
    return 100 * math.expm1(history[-1]["valid_gnn"] - history[-1]["valid_base"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="append", required=True, help="a run that is searched; may be given again")
    parser.add_argument("--forks", type=Path, default=Path("runs/defaults"), help="where the forks are kept")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of 256 tokens (default: %(default)s)")
    parser.add_argument("--change", action="append", choices=list(CHANGES), help="only this; may be given again")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    names = [name for name in CHANGES if not args.change or name in args.change]
    found: dict[str, dict[str, Any]] = {name: {"change": name} for name in names}
    for path in args.run:
        run = open_run(path)
        folder = args.forks / run.root.name
        folder.mkdir(parents=True, exist_ok=True)

        forks = Forks(run, folder, args.steps)

        def measure(name: str, forks: Forks = forks, path: str = path) -> dict[str, Any]:
            value = valid_change(forks, name)
            found[name][Path(path).name] = value
            return {"change": name, "percent": value}

        one_by_one(path, names, measure)
    report("change of valid's perplexity against base, percent", list(found.values()), args.json)


if __name__ == "__main__":
    main()
