"""A finished run that a test may change, and texts to put into it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gnnlm.library.library import Library
from gnnlm.run import Run

WORDS = [a + b for a in ("ga", "po", "si", "tu") for b in ("l", "mo", "p", "s")]


def make_text(number: int, sentences: int = 4) -> str:
    """A text of its own for each number, with no sentence of the corpus or of another number."""
    rng = random.Random(number)
    return "\n\n".join(f"{' '.join(rng.choices(WORDS, k=9))} {number}." for _ in range(sentences)) + "\n"


@pytest.fixture
def root(tiny_run: Run, tmp_path: Path) -> Path:
    """A copy of the tiny run."""
    return Path(shutil.copytree(tiny_run.root, tmp_path / "run"))


@pytest.fixture
def library(root: Path) -> Library:
    return Library(root)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write texts as files of a folder, and return it."""

    def made(folder: str = "new", **texts: str) -> Path:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        for name, text in texts.items():
            (place / f"{name}.txt").write_text(text, encoding="utf-8")
        return place

    return made
