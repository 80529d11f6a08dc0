"""Command-line options made from the fields of a model, so that an option is declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo


def with_options(model: type[BaseModel], names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each named field of a model, after its own arguments.

    The command receives their values as keyword arguments.
    """
    options = [_parameter(name, model.model_fields[name]) for name in names]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        arguments = [one for one in own if one.default is inspect.Parameter.empty]
        parameters = [*arguments, *options, *own[len(arguments) :]]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorated


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the option of a field; a field that is true by default becomes a switch that turns it off."""
    kind = field.annotation
    default = field.default
    metavar = None
    flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
    if default is True:
        name = f"no_{name}"
        flag = f"--no-{flag.removeprefix('--')}"
        default = False
    elif default == ():
        kind = list[str] | None
        default = None
        metavar = "TEXT"
    elif default is None:
        metavar = "NAME"
    option = typer.Option(flag, metavar=metavar, help=field.description)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
