"""Writes docs/cli.md from the command line's own help and docs/config.md from the config's fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gnnlm.cli.commands import app
from gnnlm.config import Config, ConfigSection

HERE = Path(__file__).parent


def cli_page() -> str:
    group = typer.main.get_command(app)
    settings = {"terminal_width": 100, "max_content_width": 100}
    context = group.make_context("gnnlm", [], resilient_parsing=True, **settings)
    lines = ["# Command line", "", "Written by `make docs` from `gnnlm --help`; do not edit.", ""]
    lines += ["```", group.get_help(context).strip(), "```", ""]
    return "\n".join(lines + _commands(group, context, "gnnlm", settings))


def _commands(group: Any, context: Any, path: str, settings: dict[str, int]) -> list[str]:
    lines = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        below = command.make_context(name, [], parent=context, resilient_parsing=True, **settings)
        lines += [f"## {path} {name}", "", "```", command.get_help(below).strip(), "```", ""]
        if hasattr(command, "list_commands"):
            lines += _commands(command, below, f"{path} {name}", settings)
    return lines


def config_page() -> str:
    lines = ["# Config", "", "Written by `make docs` from the fields' own words; do not edit.", ""]
    lines += ["Every field can be set on the command line: `--set gnn.layers=2`.", ""]
    lines += _table(Config, "")
    return "\n".join(lines + _sections(Config, ""))


def _sections(model: type[BaseModel], prefix: str) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection):
            place = f"{prefix}{name}"
            lines += [f"## {place}", "", str(field.description), "", *_table(field.annotation, f"{place}.")]
            lines += _sections(field.annotation, f"{place}.")
    return lines


def _table(model: type[BaseModel], prefix: str) -> list[str]:
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection):
            continue
        default = "required" if field.default is PydanticUndefined else f"`{_show(field.default)}`"
        meaning = str(field.description).replace("|", "\\|")
        lines.append(f"| `{prefix}{name}` | {default} | {meaning} |")
    return [*lines, ""]


def _show(value: object) -> str:
    def plain(item: object) -> object:
        return item.model_dump() if isinstance(item, BaseModel) else str(item)

    text = json.dumps(value, default=plain)
    return text if len(text) <= 70 else text[:67] + "..."


PAGES = {"cli.md": cli_page, "config.md": config_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
