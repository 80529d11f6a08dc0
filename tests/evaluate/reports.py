"""Reports made up for the tests."""

from __future__ import annotations

from typing import Any

from gnnlm.evaluate.report import CacheFacts, CodecFacts, LmFacts, Report, Row, TrainingFacts

MIX = {"k": 8, "temperature": 0.1, "weight": 0.2}


def make_report(rows: dict[str, dict[str, Any]], model: str = "tiny") -> Report:
    """A report with these rows; figures that a row leaves out are plain ones."""
    usual = {
        "ppl": 10.0,
        "ppl_95": (9.0, 11.5),
        "ppl_word": 20.0,
        "bits_per_byte": 1.0,
        "helped": 0.5,
        "hurt": 0.5,
        "tokens_per_second": 100.0,
        "change": 0.0,
        "change_low": -0.01,
        "change_high": 0.01,
        "ppl_early": 12.0,
        "ppl_late": 9.0,
        "early_gain": 0.0,
        "late_gain": 0.0,
    }
    return Report(
        rows={name: Row(**{**usual, **row}) for name, row in rows.items()},
        documents=[],
        test_tokens=1000,
        test_documents=3,
        split_documents={"train": 30, "valid": 10, "test": 3},
        store_tokens=1000,
        model=model,
        mix={"base": MIX, "gnn": MIX},
        lm=LmFacts(),
        overlap={"train": None, "valid": None, "test": None},
        overlap_ngram=8,
        training=TrainingFacts(best_step=1, steps_done=2, parameters=3),
        codec=CodecFacts(kind="fp16", bytes=64, compression=2.0),
        cache=CacheFacts(form="none", dtype="fp16"),
        seconds={},
    )
