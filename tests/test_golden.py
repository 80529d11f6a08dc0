"""Log-probabilities that no change of structure may move: every preset, codec, cache form and kind of base model.

The expected values stand in `tests/golden/log_probs.json`. A change that means to move them writes them anew and says
why in its commit: GNNLM_WRITE_GOLDEN=1 pytest tests/test_golden.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnlm.config import parse_config
from gnnlm.run import Run
from tests.conftest import TINY, merge
from tests.train.test_lm import CASES as SCRATCH_CASES
from tests.train.test_lm import SCRATCH

FILE = Path(__file__).parent / "golden" / "log_probs.json"
TOKENS = 24
STEPS = {"train": {"curriculum": [{"k": 4, "steps": 3}, {"k": 8, "steps": 2}]}, "tune": {"gate": False}}
PQ = {"kind": "pq", "bytes": 8, "train_rows": 2000}
CASES: dict[str, dict[str, Any]] = {
    "default, projected": {},
    "default, gate": {"tune": {"gate": True}},
    "default, pq, cache pq": {"codec": PQ, "cache": {"form": "states", "dtype": "pq", "bytes": 8}},
    "paper, states": {
        "gnn": {"preset": "paper"},
        "search": {"exclude": "document"},
        "cache": {"form": "states"},
    },
    "paper, pq, projected": {
        "gnn": {"preset": "paper"},
        "search": {"exclude": "document"},
        "codec": PQ,
        "tune": {"buckets": 8},
    },
    "released, none": {"gnn": {"preset": "released"}, "cache": {"form": "none"}},
    "own width, l2, receptive field": {
        "gnn": {"width": 16},
        "index": {"metric": "l2"},
        "search": {"exclude": "receptive-field"},
    },
    "adaptive": merge(SCRATCH, {"lm": {"train": {"steps": 10}}}),
    "transformer-xl": merge(merge(SCRATCH, SCRATCH_CASES["transformer-xl"]), {"lm": {"train": {"steps": 10}}}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_log_probs_are_what_they_were(case: str, tiny_lm_dir: Path, text_dir: Path, tmp_path: Path) -> None:
    values = merge(merge(merge(TINY, STEPS), {"lm": {"model": str(tiny_lm_dir)}}), CASES[case])
    run = Run(parse_config(merge(values, {"run": str(tmp_path / "run"), "corpus": {"source": str(text_dir)}})))
    report = run.build_all().path
    found = {}
    for name in ("base", "knn", "gnn", "gnn_knn"):
        log_probs = np.load(report / f"{name}.log_probs.npy").astype(np.float64)
        found[name] = [float(log_probs.mean()), *log_probs[:TOKENS].tolist()]
    if os.environ.get("GNNLM_WRITE_GOLDEN"):
        golden = json.loads(FILE.read_text()) if FILE.exists() else {}
        golden[case] = {name: [round(value, 6) for value in values] for name, values in found.items()}
        FILE.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    expected = json.loads(FILE.read_text())[case]
    near = 2e-2 if "pq" in case else 2e-4  # FAISS learns slightly other codes with other vector instructions
    for name, log_probs in found.items():
        np.testing.assert_allclose(log_probs, expected[name], atol=near, rtol=near, err_msg=name)
