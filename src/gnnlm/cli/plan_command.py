"""gnnlm plan: the disk, memory and time that a run needs, here or on another machine."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from gnnlm.artifact import human_bytes
from gnnlm.cli.options import AsJson, ConfigPath, DataDir, Overrides, open_config, out
from gnnlm.errors import ConfigError
from gnnlm.progress import human_time, say, warn

if TYPE_CHECKING:
    from gnnlm.plan.needs import Need
    from gnnlm.plan.sizes import TextSize
    from gnnlm.run import Run

# Modules that load torch are imported by the commands that need them: the others, and --help, start at once.

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
SECONDS = ((3600, 60.0), (48 * 3600, 360.0), (math.inf, 8640.0))  # up to each limit, the steps of `human_time`
BYTES = ((1024, 1.0), *((1024.0 ** (n + 1), 1024.0**n / 10) for n in (1, 2, 3)), (math.inf, 1024.0**4 / 10))
HELD_OUT = 250_000  # tokens of valid and of test, where they are not known: as many as WikiText-103 has


def parse_count(text: str, option: str) -> int:
    """Parse a number with a unit.

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

    from gnnlm.plan.fits import FreeResources, problems
    from gnnlm.plan.needs import PlanFacts
    from gnnlm.plan.needs import plan as needs_of
    from gnnlm.plan.rates import bf16_slowdown, slow_settings
    from gnnlm.run.planning import done_stages, model_sizes, rates_here, remaining

    made = open_config(config, set_, data_dir)
    free = FreeResources.here(made.root)
    if memory is not None:
        free = replace(free, memory=float(parse_count(memory, "--memory")))
    if disk is not None:
        free = replace(free, disk=float(parse_count(disk, "--disk")))
    text = _text_sizes(made, None if tokens is None else parse_count(tokens, "--tokens"))
    model = model_sizes(made)
    say("plan: measuring this machine")
    done = {} if tokens is not None else done_stages(made)
    slowdown = bf16_slowdown(made.config.lm.device)
    rates = rates_here(made, model, "lm" not in done, slowdown)
    measured_cores = torch.get_num_threads()
    if cores is not None:
        rates = rates.on(cores / measured_cores)
    facts = PlanFacts(model, text, rates)
    needs = needs_of(made.config, facts)
    left = remaining(needs, made) if tokens is None else needs
    slow = slow_settings(made.config, slowdown, left)
    lacks = list(problems(made.config, facts, left, free))
    title = (
        f"{made.root}: {text['train'].tokens:,} store tokens, width {model.width:,}, {model.parameters:,} parameters"
    )
    out.print(_table(needs, done, title, "time here" if cores is None else f"time on {cores} cores"))
    for problem in lacks:
        warn(f"this run does not fit: {problem}")
    for setting in slow:
        warn(setting)
    if as_json:
        stages = {
            name: {"done": name in done, "there": done.get(name, 0), **asdict(need)}
            for name, need in without(needs, done).items()
        }
        machine = {"cores": cores or measured_cores, "rates": rates.as_dict()}
        found = {"fits": not lacks, "problems": lacks, "slow": slow}
        print(json.dumps({"stages": stages, **asdict(total(without(needs, done))), **machine, **found}))


def _text_sizes(made: Run, tokens: int | None) -> dict[str, TextSize]:
    """Return the sizes of the splits, with another number of store tokens if one is given."""
    from gnnlm.plan.sizes import TextSize
    from gnnlm.run.planning import sizes_of_text

    if tokens is None:
        return sizes_of_text(made)
    try:
        text = sizes_of_text(made)
    except ConfigError:  # not built yet
        held_out = TextSize(min(HELD_OUT, max(1, tokens // 10)), 1)
        text = {"train": TextSize(tokens, 1), "valid": held_out, "test": held_out}
    return {**text, "train": text["train"].scaled(tokens)}


def _table(needs: Mapping[str, Need], done: Mapping[str, int], title: str, time: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stage", "disk", "memory", time):
        table.add_column(column, justify="left" if column == "stage" else "right")
    shown = {name: rounded(need) for name, need in without(needs, done).items()}
    for name, need in {**shown, "remaining": total(shown)}.items():
        if name in done:
            table.add_row(name, f"{human_bytes(done[name])} on disk", "-", "done")
        else:
            table.add_row(name, human_bytes(need.disk), human_bytes(need.memory), human_time(need.seconds))
    return table


def without(needs: Mapping[str, Need], done: Collection[str]) -> dict[str, Need]:
    """Return the needs with nothing for the stages that are done."""
    return {
        name: replace(need, disk=0.0, memory=0.0, seconds=0.0) if name in done else need for name, need in needs.items()
    }


def total(needs: Mapping[str, Need]) -> Need:
    """Return the disk and the time of all stages, and the memory of the largest."""
    from gnnlm.plan.needs import Need

    return Need(
        disk=sum(need.disk for need in needs.values()),
        memory=max(need.memory for need in needs.values()),
        seconds=sum(need.seconds for need in needs.values()),
    )


def rounded(need: Need) -> Need:
    """Return a need as the table shows it, so that the totals match the rows."""
    steps = BYTES, BYTES, SECONDS
    disk, memory, seconds = (round_to(value, step) for value, step in zip(astuple(need), steps, strict=True))
    return replace(need, disk=disk, memory=memory, seconds=seconds)


def round_to(value: float, steps: Sequence[tuple[float, float]]) -> float:
    """Round to a multiple of the step for values of this size; what is not 0 does not become 0.

    >>> [round_to(seconds, SECONDS) for seconds in (0, 10, 100, 4000, 300_000)]
    [0.0, 60.0, 120.0, 3960.0, 302400.0]
    >>> round_to(1000.4, BYTES), round_to(1024 * 1.26, BYTES)
    (1000.0, 1331.2)
    """
    step = next(step for limit, step in steps if value < limit)
    return step * max(round(value / step), 1 if value else 0)
