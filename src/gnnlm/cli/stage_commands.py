"""A command for each stage of a run, made from the stages themselves."""

from __future__ import annotations

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
from gnnlm.run.stages import STAGES
from gnnlm.stage import Stage


def add_stage_commands(app: typer.Typer) -> None:
    """Add the stages' commands; training a base model has commands of its own (`gnnlm lm`)."""
    for stage in STAGES.values():
        if stage.name != "lm":
            app.command(name=stage.name, help=stage.help)(_command(stage))


def _command(stage: Stage):  # type: ignore[no-untyped-def]
    if stage.name == "corpus":  # the only stage that reads the text

        def corpus(
            config: ConfigPath, set_: Overrides = None, data_dir: DataDir = None, rebuild: Rebuild = False
        ) -> None:
            one_stage(open_config(config, set_, data_dir), stage.name, rebuild)

        return corpus
    if stage.name == "eval":

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
            made = open_config(config, set_)
            if current:
                show_current(made, as_json)
                return
            with engine_of(made, engine, ray_address, storage):
                made.build(stage.name, rebuild)
            show_report(made, as_json)

        return evaluate

    if stage.name == "train":

        def train(config: ConfigPath, set_: Overrides = None, rebuild: Rebuild = False, finish: Finish = False) -> None:
            made = open_config(config, set_)
            made.finish_training = finish
            one_stage(made, stage.name, rebuild)

        return train

    def build(
        config: ConfigPath,
        set_: Overrides = None,
        rebuild: Rebuild = False,
        engine: EngineName = "local",
        ray_address: RayAddress = None,
        storage: StorageUrl = None,
    ) -> None:
        made = open_config(config, set_)
        with engine_of(made, engine, ray_address, storage):
            one_stage(made, stage.name, rebuild)

    return build
