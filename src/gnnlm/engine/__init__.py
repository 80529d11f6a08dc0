"""The engine: where the shards of a stage are worked on, and where segments are held for search.

A stage is cut into shards, the same on every engine. A task does one shard and gives arrays, which the stage appends
to its artifact in order. `local.py` does the tasks one after the other in this process and passes their arrays on.
`ray.py` does them all over a Ray cluster: a worker writes the arrays to a file, which gets its name when it is whole,
so an existing file is a finished task. Nothing else knows Ray.

This package knows neither stages nor runs: a task's work is a callable that it is given.
"""

from gnnlm.engine.choose_engine import using
from gnnlm.engine.engine_protocol import Engine, ObjectPool, Place, Recipe, Spread
from gnnlm.engine.local import HERE, LocalEngine, here
from gnnlm.engine.machine_check import MISSING
from gnnlm.engine.shard_task import Arrays, FileTask, Task, Work

__all__ = [
    "HERE",
    "MISSING",
    "Arrays",
    "Engine",
    "FileTask",
    "LocalEngine",
    "ObjectPool",
    "Place",
    "Recipe",
    "Spread",
    "Task",
    "Work",
    "here",
    "using",
]
