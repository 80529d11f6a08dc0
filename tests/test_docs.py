"""The docs say what the code does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from gnnlm.cli.commands import app
from gnnlm.config import field_names, load_config

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["cli.md", "config.md"])
def test_generated_pages_are_current(name: str) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / name).read_text() == module.PAGES[name](), "run `make docs`"


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name
)
def test_links_and_names_in_pages_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
    groups = {group.name for group in app.registered_groups}
    commands = groups | {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
    for word in re.findall(r"^\s*(?:\$ )?gnnlm ([a-z]+)", text, flags=re.MULTILINE):
        assert word in commands, f"{page.name} shows gnnlm {word}"
    for name in re.findall(r"--set ([a-z_.]+)=", text):
        assert name in field_names(), f"{page.name} sets {name}"


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_configs_are_valid_and_stay_inside_the_project(file: Path) -> None:
    config = load_config(file)
    assert not Path(config.run).is_absolute()
    assert not str(config.corpus.source).startswith(("/", ".."))


def test_tree_in_readme_is_the_tree() -> None:
    """Each entry of the package has a line of its own in README's tree, and no line is of anything else."""
    text = (ROOT / "README.md").read_text()
    tree = text.split("## The tree")[1].split("```")[1]
    inside = tree.split("src/gnnlm/\n")[1].split("\ntests/")[0]
    shown = {name for line in inside.splitlines() for name in re.findall(r"^  ([\w./]+)", line)}
    hidden = ("__pycache__", "__init__.py", "__main__.py", "py.typed")
    there = {p.name + "/" * p.is_dir() for p in (ROOT / "src" / "gnnlm").iterdir() if p.name not in hidden}
    assert shown == there
