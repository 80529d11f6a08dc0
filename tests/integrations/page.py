"""docs/integrations.md, by section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "integrations.md"


def blocks(section: str, language: str) -> list[str]:
    """The examples of a section in one language; "" for command lines."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [code for kind, code in re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL) if kind == language]


def run_page(section: str, run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a section's Python, one block after the other, where `runs/mine` is a run; the names it made."""
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "runs" / "mine").symlink_to(run)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for block in blocks(section, "python"):
        exec(compile(block, str(PAGE), "exec"), names)
    return names
