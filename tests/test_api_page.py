"""The examples of docs/api.md run, one after the other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from gnnlm.run import Run

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def test_examples_run(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_run.root, tmp_path / "runs" / "mine")  # some examples change it
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 9
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["prediction"].real.tolist() == [[True, True], [True, False]]
    assert names["log_probs"].shape[0] == 1
    assert names["beams"].lengths == (7, 6)
