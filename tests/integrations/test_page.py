"""The examples of docs/integrations.md that need transformers alone run, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnnlm.run import Run
from tests.integrations.page import blocks, run_page


def test_transformers(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(blocks("transformers", "python")) == 5
    names = run_page("transformers", tiny_run.root, tmp_path, monkeypatch)
    assert names["ids"].shape[1] == names["inputs"]["input_ids"].shape[1] + 10
    assert names["out"].logits.exp().sum(-1).sub(1).abs().max() < 1e-4
    assert (tmp_path / "runs" / "saved" / "tokenizer.json").is_file()
