"""The examples of docs/integrations.md that need other people's tools run, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnnlm.run import Run
from tests.cli import gnnlm as command
from tests.integrations.page import blocks, run_page

pytestmark = pytest.mark.integration


def test_lm_eval(tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks").mkdir()
    (task,), (data,) = (blocks("lm-evaluation-harness", language) for language in ("yaml", "json"))
    (tmp_path / "tasks" / "functions.yaml").write_text(task, encoding="utf-8")
    (tmp_path / "tasks" / "functions.jsonl").write_text(data, encoding="utf-8")
    assert len(blocks("lm-evaluation-harness", "python")) == 2
    names = run_page("lm-evaluation-harness", tiny_run.root, tmp_path, monkeypatch)
    assert names["by_name"]["n-samples"]["functions"]["effective"] == 2
    (line,) = blocks("lm-evaluation-harness", "")
    program, *arguments = line.split()
    assert program == "gnnlm"
    assert "acc" in command(*arguments).stdout
