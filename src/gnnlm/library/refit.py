"""Fitting the mix, the index or the graph network again with the store as a generation serves it.

The stages' own functions build the artifacts, from the generation's store in place of the run's , in a folder
of their own: `refitted/0004/tune`, and `refitted/0004/segments/0002/index` for the part of the generation's third
segment. The stages themselves stay as they are.

Everything starts from nothing. So what comes out depends on the served store alone, as if a run had been built of it,
and nothing of a removed document is left in it; the old weights would carry what they remember along. Documents that
share text with valid or test take no part where something is measured or chosen on valid.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnnlm.artifact import Artifact, Draft, read_manifest, state_of
from gnnlm.artifact.ownership import settle
from gnnlm.corpus.stream import SPLITS
from gnnlm.engine import here
from gnnlm.errors import ArtifactError, ConfigError, VersionError
from gnnlm.generation import Generation, RefittedArtifact, SegmentRecord
from gnnlm.layout import REFITTED
from gnnlm.progress import say
from gnnlm.retrieval.auto_index import choose_index
from gnnlm.run import Run
from gnnlm.run.snapshot import Snapshot
from gnnlm.stage import BuildContext, ancestors

STEPS = {"mix": ("search", "tune"), "index": ("index",), "gnn": ("search", "train", "cache", "tune")}
SEARCHED = {"mix": ("valid",), "index": (), "gnn": ("train", "valid")}  # the splits that each needs neighbours of
NOT_SERVED = "search"  # it is made on the way


def folder_of(run: Run, now: Generation) -> Path:
    """Return the folder in which a refit of this generation is built."""
    return run.root / REFITTED / f"{now.number + 1:04d}"


def refitted(run: Run, now: Generation, part: str) -> Generation:
    """Return the generation with a part fitted again, uncommitted; unchanged if the part was fitted with this store."""
    check_part(run, now, part)
    base = Run(run.config, reading=True)  # built in this process, whatever holds the segments that are served
    if all(_is_fitted(base, now, stage) for stage in STEPS[part] if stage != NOT_SERVED):
        say(f"refit {part}: it was fitted with what is served now, and is left as it is")
        return now
    made = now
    for stage in STEPS[part]:
        if stage in base.stages:
            made = _fitted(base, made, stage, folder_of(run, now), SEARCHED[part])
    if part == "gnn":
        made = replace(made, segments=tuple(replace(one, unseen=one.overlapping) for one in made.segments))
    return replace(made, refitted={name: one for name, one in made.refitted.items() if name != NOT_SERVED})


def check_part(run: Run, now: Generation, part: str) -> None:
    """Refuse a refit that makes no sense."""
    if part not in STEPS:
        raise ConfigError(f"expected one of the parts {', '.join(STEPS)} to refit (got {part!r})")
    if not now.number:
        raise ConfigError(
            f"{run.root} serves what it was built with, so there is nothing to refit; to train it in another way, "
            f"change its config and build it again: gnnlm run {shlex.quote(str(run.root))} --rebuild"
        )
    if part == "index":
        _check_index(run, now)
    if part == "gnn":
        _check_gnn(run)


def _check_index(run: Run, now: Generation) -> None:
    chosen = choose_index(run.config.index, now.rows, int(run.artifact("encode").facts["width"]))
    if "index" not in now.refitted and run.artifact("index").facts["kind"] == chosen.kind == "exact":
        raise ConfigError(f"{run.root} is searched exactly ({chosen.why}); there is no index to fit")


def _check_gnn(run: Run) -> None:
    from gnnlm.train.processes import here

    if "train" not in run.stages:
        raise ConfigError(f"{run.root} has no graph network to fit (gnn.layers is 0); refit its mix, with --part mix")
    if run.snapshot.has_unread:
        raise ConfigError(
            f"the base model of {run.root} was trained on its text, and its network on states from before that, which "
            "are there for the run as it was built alone; build another run from the text"
        )
    if here().count > 1:
        raise ConfigError(f"a refit trains in one process (got {here().count}); start it without a launcher")


def _fitted(base: Run, now: Generation, name: str, folder: Path, splits: tuple[str, ...]) -> Generation:
    """Return the generation with what one stage builds from it, made now or found finished."""
    stage, snapshot = base.stages[name], _read_by(base.snapshot.at(now), name)
    path, inputs = folder / stage.folder, _inputs(snapshot, name, splits)
    settle(path)
    if state_of(path, inputs) == "done":
        artifact = Artifact.open(path)
    else:
        curves = base.root / "tensorboard" / f"refit-{now.number + 1}"
        context = BuildContext(snapshot, list(base.stages.values()), here, curves, splits)
        with Draft(path, name, inputs, rebuild=True, made_with={"threads": base.engine.threads}) as draft:
            if draft.resumed:
                say(f"{name}: resuming where it was interrupted")
            artifact = stage.build(context, draft)
    own = RefittedArtifact(str(path.relative_to(base.root)), artifact.fingerprint)
    segments, kind = now.segments, stage.part
    if kind:
        parts = artifact.parts or [None] * len(segments)
        segments = tuple(_with(base, one, kind, part) for one, part in zip(segments, parts, strict=True))
    return replace(now, segments=segments, refitted={**now.refitted, name: own})


def _with(run: Run, segment: SegmentRecord, kind: str, part: Artifact | None) -> SegmentRecord:
    """Return the segment with its part of a kind replaced, or without one."""
    parts = {name: found for name, found in segment.parts.items() if name != kind}
    places = {name: path for name, path in segment.places.items() if name != kind}
    if part is not None:
        parts[kind], places[kind] = part.fingerprint, str(part.path.relative_to(run.root))
    return replace(segment, parts=parts, places=places)


def _read_by(snapshot: Snapshot, name: str) -> Snapshot:
    """Return the snapshot as a stage may read it: the index has all rows, other stages measure or choose on valid."""
    return snapshot if name == "index" else snapshot.without_overlap()


def _inputs(snapshot: Snapshot, name: str, splits: Sequence[str]) -> dict[str, Any]:
    """Return what determines a refit: the stage's config, and the trained artifacts and documents that it reads."""
    before = [other for other in ancestors(snapshot.stages, name) if other != NOT_SERVED]  # the others determine it
    kinds = [kind for other, kind in snapshot.segment_kinds.items() if other in before]
    config = read_manifest(snapshot.path(name)).inputs
    return {
        **{key: value for key, value in config.items() if not key.startswith("artifact ")},
        **{f"artifact {other}": snapshot.trained(other).fingerprint for other in before},
        **({"splits": list(splits)} if name == NOT_SERVED else {}),  # a mix needs fewer than a network
        "served": [
            {"removed": list(one.removed), **{kind: one.parts[kind] for kind in kinds if kind in one.parts}}
            for one in snapshot.generation.segments
        ],
    }


def _is_fitted(run: Run, now: Generation, name: str) -> bool:
    """Return whether what the generation serves for a stage was fitted with its own store, and every byte is whole.

    The doctor sends damage here.
    """
    if name not in run.stages:
        return True
    if name not in now.refitted:
        return False
    snapshot = _read_by(run.snapshot.at(now), name)
    try:
        if snapshot.trained(name).inputs != _inputs(snapshot, name, SPLITS):
            return False
        snapshot.artifact(name).verify(trust=False)
    except VersionError:
        raise
    except ArtifactError:
        return False
    return True
