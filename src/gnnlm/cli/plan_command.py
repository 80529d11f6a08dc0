"""gnnlm plan: the disk, memory and time that a run needs, here or on another machine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from gnnlm.artifact import human_bytes
from gnnlm.cli.options import AsJson, ConfigPath, DataDir, Overrides, open_config, out
from gnnlm.errors import ConfigError
from gnnlm.progress import human_time, say, warn

if TYPE_CHECKING:
    from gnnlm.run import Run
    from gnnlm.run.sizes import Amount

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
HELD_OUT = 250_000  # tokens of valid and of test, where they are not known: as many as WikiText-103 has


def parse_count(text: str, option: str) -> int:
    """A number with a unit.

    >>> parse_count("768M", "--tokens"), parse_count("1.5B", "--tokens"), parse_count("2000", "--tokens")
    (768000000, 1500000000, 2000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBGT]?)", text.strip().upper())
    if found is None or not (count := round(float(found[1]) * UNITS[found[2]])):
        raise ConfigError(f"{option}: expected a number such as 500K, 100M or 10B (got {text})")
    return count


def plan(
    config: ConfigPath,
    set_: Overrides = None,
    data_dir: DataDir = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar="N", help="Plan for a store of so many tokens, such as 100M or 10B."),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option("--cores", min=1, metavar="N", help="Plan for a machine with so many cores like these."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="BYTES", help="Plan for so much free memory, such as 64G.")
    ] = None,
    disk: Annotated[
        str | None, typer.Option("--disk", metavar="BYTES", help="Plan for so much free disk, such as 2T.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine for a few seconds, and predict the disk, memory and time of the remaining stages.

    Says what does not fit, and the setting that would make it fit. gnnlm run checks the same before it begins.
    """
    import torch

    from gnnlm.run.calibrate import measured_rates
    from gnnlm.run.fits import problems, remaining
    from gnnlm.run.machine import Machine
    from gnnlm.run.plan import plan as make_plan
    from gnnlm.run.plan import table_of
    from gnnlm.run.rates import slow_settings
    from gnnlm.run.sizes import describe, done_stages
    from gnnlm.run.speed import Speed

    made = open_config(config, set_, data_dir)
    machine = Machine.here(made.root)
    if memory is not None:
        machine = replace(machine, memory=float(parse_count(memory, "--memory")))
    if disk is not None:
        machine = replace(machine, disk=float(parse_count(disk, "--disk")))
    text, about = _amounts(made, None if tokens is None else parse_count(tokens, "--tokens")), describe(made)
    say("plan: measuring this machine")
    done = {} if tokens is not None else done_stages(made)
    speed = Speed.measured(made.config.lm.device)
    rates = measured_rates(made, about, speed, learning="lm" not in done)
    here = torch.get_num_threads()  # those that were measured
    rates = rates if cores is None else rates.on(cores / here)
    needs = make_plan(made.config, about, text, rates)
    left = remaining(needs, made) if tokens is None else needs
    slow = slow_settings(made.config, speed, left)
    lacks = problems(made.config, about, text, left, machine) if left else []
    whole = table_of(needs, done)
    title = (
        f"{made.root}: {text['train'].tokens:,} store tokens, width {about.width:,}, {about.parameters:,} parameters"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "disk", "memory", "time here" if cores is None else f"time on {cores} cores"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, need in whole["stages"].items():
        if need["done"]:
            table.add_row(name, f"{human_bytes(need['there'])} on disk", "-", "done")
        else:
            table.add_row(name, human_bytes(need["disk"]), human_bytes(need["memory"]), human_time(need["seconds"]))
    table.add_row("remaining", human_bytes(whole["disk"]), human_bytes(whole["memory"]), human_time(whole["seconds"]))
    out.print(table)
    for words in lacks:
        warn(f"this run does not fit: {words}")
    for words in slow:
        warn(words)
    if as_json:
        measured = {**vars(rates), "train": {str(k): value for k, value in rates.train.items()}}
        exact = table_of(needs, done, exact=True)
        found = {"fits": not lacks, "problems": lacks, "slow": slow}
        print(json.dumps({**exact, "cores": cores or here, "rates": measured, **found}))


def _amounts(made: Run, tokens: int | None) -> dict[str, Amount]:
    """The text of a run; with another number of store tokens, in documents of the same length."""
    from gnnlm.run.sizes import Amount, amounts

    if tokens is None:
        return amounts(made)
    try:
        text = amounts(made)
    except ConfigError:  # not built yet
        held = Amount(min(HELD_OUT, max(1, tokens // 10)), 1)
        text = {"train": Amount(tokens, 1), "valid": held, "test": held}
    return {**text, "train": text["train"].scaled(tokens)}
