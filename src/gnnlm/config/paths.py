"""Local paths in the saved config of a run, written so that they lead to the same files from any folder.

A local path is saved absolute; one inside the run directory begins with `$RUN`, so that a run can be moved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gnnlm.config.config_model import Config
from gnnlm.config.corpus_config import BENCHMARK_NAMES
from gnnlm.config.lm_config import SCRATCH

RUN = "$RUN"
PATHS = {"lm": ("model",), "corpus": ("source", "data_dir", "dataset", "train", "valid", "test")}
NAMES = (SCRATCH, "smollm2", "python-docs", *BENCHMARK_NAMES)  # what these fields can hold that is never a path


def portable(config: Config) -> Config:
    """Return the config with every local path absolute, or relative to `$RUN` if it lies in the run directory."""
    corpus = config.corpus
    places = {"lm": {"model"}, "corpus": {"data_dir"}}
    if corpus.data_dir is None:  # else the others start from there
        places["corpus"] |= {"dataset"} if corpus.dataset is not None else {"source", "train", "valid", "test"}
    update = {}
    for section, fields in places.items():
        values = getattr(config, section)
        moved = {field: _portable(getattr(values, field), Path(config.run)) for field in sorted(fields)}
        update[section] = values.model_copy(update=moved)
    return config.model_copy(update=update)


def _portable(value: str | None, run: Path) -> str | None:
    if value is None or value in NAMES or not Path(value).expanduser().exists():
        return value
    path, root = (Path(os.path.abspath(place.expanduser())) for place in (Path(value), run))
    return str(Path(RUN, path.relative_to(root))) if path.is_relative_to(root) else str(path)


def expand_run(values: dict[str, Any], run: Path) -> None:
    """Replace `$RUN` at the beginning of paths in plain config values by the run directory."""
    for section, fields in PATHS.items():
        below = values.get(section)
        if not isinstance(below, dict):
            continue
        for field in fields:
            parts = Path(below[field]).parts if isinstance(below.get(field), str) else ()
            if parts[:1] == (RUN,):
                below[field] = str(run.joinpath(*parts[1:]))
