"""Saving the config in the run directory."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path

from gnnlm.artifact import disk, write_json, write_whole
from gnnlm.config.config_file import dump_config, load_config
from gnnlm.config.config_model import Config
from gnnlm.config.paths import portable
from gnnlm.errors import ConfigError
from gnnlm.progress import warn

HEADER = "# Written by gnnlm: the config that this run was last built with. $RUN is this directory.\n"

FOR_TRANSFORMERS = {"model_type": "gnnlm", "architectures": ["OpenBookForCausalLM"]}  # integrations/transformers.py


def save_config(config: Config) -> None:
    """Write `config.yaml` into the run directory; a file that gnnlm did not write is kept, or copied if it differs."""
    root = Path(config.run)
    if not (root / "config.json").exists():  # by it transformers' Auto classes know a run
        write_json(root / "config.json", FOR_TRANSFORMERS)
    file, text = root / "config.yaml", HEADER + dump_config(portable(config))
    if file.exists() and not file.read_bytes().startswith(HEADER.encode()):
        with suppress(ConfigError):
            if load_config(root).model_copy(update={"run": config.run}) == config:
                return
        kept = next(path for n in count(1) if not (path := file.with_name(f"config.{n}.yaml")).exists())
        disk.copy(file, kept)
        warn(f"{file} was not written by gnnlm and says something else; it is kept as {kept}")
    write_whole(file, text)
