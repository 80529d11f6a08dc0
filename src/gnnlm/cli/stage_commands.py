"""A command for each stage of a run, made from the stages themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from gnnlm.cli.options import (
    AsJson,
    ConfigPath,
    DataDir,
    EngineName,
    Finish,
    Overrides,
    RayAddress,
    Rebuild,
    StorageUrl,
    engine_of,
    one_stage,
    open_config,
)
from gnnlm.cli.printed_reports import show_current, show_report
from gnnlm.evaluate.eval_stage import EVAL
from gnnlm.run.stages import STAGES
from gnnlm.stage import Stage
from gnnlm.train.lm_stage import LM


def add_stage_commands(app: typer.Typer) -> None:
    """Add the stages' commands; training a base model has commands of its own (`gnnlm lm`)."""
    for stage in STAGES.values():
        if stage is not LM:
            command = evaluate if stage is EVAL else command_of(stage)
            app.command(name=stage.name, help=stage.help)(command)


def command_of(stage: Stage) -> Callable[..., None]:
    """Return the command of a stage, with the options that concern it."""

    def read(config: ConfigPath, set_: Overrides = None, data_dir: DataDir = None, rebuild: Rebuild = False) -> None:
        one_stage(open_config(config, set_, data_dir), stage.name, rebuild)

    def train(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False, finish: Finish = False) -> None:
        run = open_config(config, set_)
        run.finish_training = finish
        one_stage(run, stage.name, rebuild)

    def build(
        config: ConfigPath,
        set_: Overrides = None,
        rebuild: Rebuild = False,
        engine: EngineName = "local",
        ray_address: RayAddress = None,
        storage: StorageUrl = None,
    ) -> None:
        run = open_config(config, set_)
        with engine_of(run, engine, ray_address, storage):
            one_stage(run, stage.name, rebuild)

    if stage.reads_text:
        return read
    return train if stage.trains else build


def evaluate(
    config: ConfigPath,
    set_: Overrides = None,
    rebuild: Rebuild = False,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    storage: StorageUrl = None,
    current: Annotated[
        bool, typer.Option("--current", help="Score test with the documents that the run serves now.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    run = open_config(config, set_)
    if current:
        show_current(run, as_json)
        return
    with engine_of(run, engine, ray_address, storage):
        run.build(EVAL.name, rebuild)
    show_report(run, as_json)
