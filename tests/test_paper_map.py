"""Every command that docs/paper-map.md names exists, with its options, parts and files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from gnnlm.cli.commands import app
from gnnlm.evaluate.analysis.analysis_parts import PARTS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
ROWS = PAGE.split("## Tables, figures and numbers")[1].split("\n## ")[0]
SPANS = re.findall(r"`([^`]+)`", ROWS)
COMMANDS = sorted({span for span in SPANS if span.startswith("gnnlm ")})


def test_every_row_has_a_command() -> None:
    rows = [line for line in ROWS.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 16
    for row in rows:
        assert "`gnnlm " in row or "`benchmarks/" in row, row


@pytest.mark.parametrize("line", COMMANDS)
def test_command_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {name: option for option in command.params for name in option.opts if name.startswith("--")}
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            assert word in options, f"{line}: {command.name} has no {word}"
            value = None if getattr(options[word], "is_flag", False) else words.pop(0)
            assert word != "--part" or value in PARTS, line
        elif word.endswith(".yaml"):
            assert (ROOT / word).is_file(), word


@pytest.mark.parametrize("file", [span for span in SPANS if span.startswith("benchmarks/")])
def test_benchmark_exists(file: str) -> None:
    assert (ROOT / file).is_file()
