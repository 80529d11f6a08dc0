"""The work of each stage's tasks, for a process that has nothing but the run directory.

Where a stage is built, the work of its tasks is made from what is open there. Here the same work is made from the
artifacts of the stage's parents, so that any process that sees the run directory can do it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from gnnlm.artifact import draft_path, joined
from gnnlm.config import load_config
from gnnlm.engine import MISSING, Place, Work
from gnnlm.errors import ModelError
from gnnlm.layout import SEGMENTS

if TYPE_CHECKING:
    from gnnlm.retrieval.segmented import SegmentedIndex
    from gnnlm.run import Run


@dataclass(frozen=True)
class StageRecipe:
    """How the work of a stage's tasks is made from a run directory."""

    stage: str

    def __call__(self, root: Path, kind: str) -> Work:
        return _work(self.stage, root, kind)


def place_of(run: Run, stage: str) -> Place:
    """The run directory: the tasks of a stage read the config, and all artifacts that the stage depends on."""
    before = ancestors(run, stage)
    kinds = [kind for name in before if (kind := run.stages[name].part)]
    paths = [run.path(name) for name in before]
    paths += [path for kind in kinds for path in sorted(run.root.glob(f"{SEGMENTS}/*/{kind}"))]
    names = (str(path.relative_to(run.root)) for path in paths)
    return Place(run.root.absolute(), ("config.yaml", "config.json", *names))


def ancestors(run: Run, stage: str) -> list[str]:
    """The stages that a stage depends on, in the order in which they are built."""
    wanted = set(run.stages[stage].parents)
    for name in reversed(run.stages):
        if name in wanted:
            wanted |= set(run.stages[name].parents)
    return [name for name in run.stages if name in wanted]


@lru_cache(maxsize=4)
def _work(stage: str, root: Path, kind: str) -> Work:
    return WORK[kind](_opened(root, stage), stage)


@lru_cache(maxsize=1)  # the next stage reads artifacts that were not there before
def _opened(root: Path, stage: str) -> Run:
    from gnnlm.run import Run

    return Run(load_config(root), reading=True)


def open_group(root: Path, first: int, last: int, generation: int = 0) -> SegmentedIndex:
    """The index of some segments of a generation of a finished run, counted from the first of them."""
    run = _opened(root, "search")
    if not generation:
        return run.parts.segment_indexes.between(first, last)
    from gnnlm.generation import read_generation
    from gnnlm.run.serving import Serving

    return Serving(run, read_generation(root, generation)).segment_indexes.between(first, last)


def identity_of(model: str) -> str:
    """Identifies the files of a model on this machine."""
    from gnnlm.lm.model_files import model_fingerprint

    try:
        return model_fingerprint(model)
    except ModelError:
        return MISSING


# -- the work of each kind of task ------------------------------------------------------------------------------------


def _encode(run: Run, _: str) -> Work:
    from gnnlm.datastore.encode import states_work

    return states_work(run.parts.encoder, run.parts.streams)


def _quantizer(run: Run, _: str) -> Work:
    from gnnlm.datastore.codec import learn_quantizer

    states = joined([part.array("states.npy") for part in run.artifact("encode").parts])
    return partial(learn_quantizer, states, run.config.codec, run.config.seed)


def _codes(run: Run, stage: str) -> Work:
    from safetensors.torch import load_file

    from gnnlm.datastore.codec import QUANTIZER, codes_work
    from gnnlm.datastore.quantize import Quantizer

    segments = [part.array("states.npy") for part in run.artifact("encode").parts]
    return codes_work(Quantizer.from_tensors(load_file(_drafted(run, stage) / QUANTIZER)), segments)


def _trained(run: Run, _: str) -> Work:
    from gnnlm.retrieval.faiss_build import train_to

    encoded, stream = run.artifact("encode"), run.parts.streams["train"]
    return partial(train_to, encoded, stream, run.config.index, run.config.seed)


def _filled(run: Run, stage: str) -> Work:
    from gnnlm.retrieval.faiss_build import TRAINED, filling

    encoded, stream = run.artifact("encode"), run.parts.streams["train"]
    return filling(encoded, stream, run.config.index.metric, _drafted(run, stage) / TRAINED)


def _search(run: Run, _: str) -> Work:
    from gnnlm.retrieval.search import search_shard

    queries = {each.stream.split: each for each in run.parts.queries}
    return partial(search_shard, queries, run.parts.index, len(run.parts.streams["train"]))


def _quantizers(run: Run, _: str) -> Work:
    from gnnlm.predict.cache_stage import learn_quantizers

    parts = run.parts
    assert parts.gnn is not None
    return partial(learn_quantizers, parts.gnn, parts.graphs, run.config.cache, run.config.seed, parts.device)


def _tables(run: Run, stage: str) -> Work:
    from gnnlm.predict.window_cache import QUANTIZERS, TableMaker, load_quantizers, tables_work

    parts, folder = run.parts, _drafted(run, stage)
    assert parts.gnn is not None
    dtype = run.config.cache.dtype
    quantizers = load_quantizers(folder / QUANTIZERS) if dtype == "pq" else []
    return tables_work(TableMaker(parts.gnn, dtype, quantizers, parts.device), parts.graphs)


def _score(run: Run, stage: str) -> Work:
    from gnnlm.predict.split_scoring import score_blocks

    if stage == "tune":
        return partial(score_blocks, run.parts.predictor_with({}), run.parts.searched("valid"))
    return partial(score_blocks, run.parts.predictor, run.parts.searched("test"))


def _drafted(run: Run, stage: str) -> Path:
    """The folder of the unfinished build of a stage."""
    return draft_path(run.path(stage))


WORK: dict[str, Callable[[Run, str], Work]] = {
    "encode": _encode,
    "quantizer": _quantizer,
    "codes": _codes,
    "trained": _trained,
    "filled": _filled,
    "search": _search,
    "quantizers": _quantizers,
    "tables": _tables,
    "score": _score,
}
