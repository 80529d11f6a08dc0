"""The engine: where the shards of a stage are worked on, and where segments are held for search.

A stage is cut into shards, the same on every engine. A task does one shard and ends in one file, which is renamed when
it is whole: a file that is there is a finished task. The stage appends the files, in order, to its artifact.
`local.py` does the tasks one after the other in this process, `ray.py` all over a Ray cluster. Nothing else knows Ray.

This package knows neither stages nor runs: a task's work is a callable that it is given.
"""

from gnnlm.engine.choose_engine import using
from gnnlm.engine.engine_protocol import Engine, Held, Place, Recipe, Spread
from gnnlm.engine.local import HERE, LocalEngine
from gnnlm.engine.machine_check import MISSING
from gnnlm.engine.shard_task import Task, Work, here, load_arrays, save_arrays

__all__ = [
    "HERE",
    "MISSING",
    "Engine",
    "Held",
    "LocalEngine",
    "Place",
    "Recipe",
    "Spread",
    "Task",
    "Work",
    "here",
    "load_arrays",
    "save_arrays",
    "using",
]
