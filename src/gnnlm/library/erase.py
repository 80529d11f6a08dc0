"""Erasing: deleting every file that no generation needs, and searching the run for what is left of its text.

Segments that the run's stages built leave their manifests, so that the stages stay what they were made as; their files
are gone. Everything that was learned from erased text stays, and is named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gnnlm.artifact import disk, write_json
from gnnlm.artifact.manifest import ERASED, MANIFEST, erased_files, places, read_manifest
from gnnlm.artifact.ownership import remove_ours
from gnnlm.corpus.stream import TEXT
from gnnlm.corpus.text_files import cited
from gnnlm.errors import ArtifactError
from gnnlm.generation import Generation, Lease, leases_of
from gnnlm.layout import ADDED, REFITTED, SEGMENTS
from gnnlm.library.erase_scan import ErasedSamples
from gnnlm.run import Run
from gnnlm.run.leftovers import needed_paths

POLL = 0.1  # seconds between two looks at the leases


@dataclass(frozen=True)
class Erasure:
    """What was erased, how many bytes were searched, where a trace was found, and what may remember the text."""

    names: tuple[str, ...]
    searched: int
    found: tuple[str, ...]
    may_remember: tuple[str, ...]


def remove_unreferenced(root: Path, now: Generation, keep: Path | None = None) -> None:
    """Remove parts of added segments and of refits that neither this generation nor a reader's needs.

    So goes what a killed writer left, but for the refit in the folder `keep`, which may go on from there.
    """
    needed = _needed(root, now)
    _remove_refits(root, needed, keep)
    for folder in sorted((root / ADDED).glob("*")):
        _remove_parts(folder, needed.get(folder, ()))
    _remove_empty(root / ADDED)


def _needed(root: Path, now: Generation) -> dict[Path, set[str]]:
    """Return the artifacts that this generation or a reader's needs, by folder."""
    found: dict[Path, set[str]] = {}
    for name in needed_paths(root, now):
        found.setdefault((root / name).parent, set()).add(Path(name).name)
    return found


def _remove_refits(root: Path, needed: Mapping[Path, Collection[str]], keep: Path | None = None) -> None:
    """Remove what was refitted and is not needed, but for the folder `keep`."""
    refits = [folder for folder in sorted((root / REFITTED).glob("*")) if folder != keep]
    parts = [segment for folder in refits for segment in sorted((folder / SEGMENTS).glob("*"))]
    for folder in (*parts, *refits):
        _remove_parts(folder, needed.get(folder, ()))
    _remove_empty(root / REFITTED)


def _remove_parts(folder: Path, kept: Collection[str] = ()) -> None:
    """Remove the artifacts of a folder but for those kept, its text last, and the folder if it is empty then.

    What is not ours stays.
    """
    if not folder.is_dir():
        return
    found = {path.name.removeprefix(".").removesuffix(".partial").removesuffix(".old") for path in folder.iterdir()}
    for kind in sorted(found - {SEGMENTS, *kept}, key=lambda kind: (kind == TEXT, kind)):
        for place in places(folder / kind):
            with suppress(OSError, ArtifactError):
                remove_ours(place)
    _remove_empty(folder / SEGMENTS)
    _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        with suppress(OSError):
            disk.remove_directory(folder)


def erase_unreferenced(run: Run, now: Generation, wait: float) -> Erasure:
    """Delete all segments that the generation does not need, for good, and search what stays for their documents.

    The search comes first, while there are states to search for, and their text goes last: erasing that was interrupted
    knows what to search for when it goes on.
    """
    root = run.root
    _wait_for_readers(root, now, wait)
    needed = {segment.name for segment in now.segments}
    doomed = [path for kind in (SEGMENTS, ADDED) for path in sorted((root / kind).glob("*/")) if path.is_dir()]
    doomed = [path for path in doomed if str(path.relative_to(root)) not in needed and _is_there(path)]
    probes = ErasedSamples.of(run, doomed, now)
    linked = sum(1 for path in doomed for file in _files(path) if file.stat().st_nlink > 1)
    _empty_first_readings(run, now.number, bool(probes.names))
    artifacts = _needed(root, now)

    def goes(file: Path) -> bool:
        """Whether a file is about to be deleted. Parts of refits have rows of the text too."""
        if root / REFITTED in file.parents:
            return file.parent.name not in artifacts.get(file.parent.parent, ())
        return file.name not in (MANIFEST, ERASED) and any(path in file.parents for path in doomed)

    found, searched = probes.search(root, goes)
    _delete(doomed, now.number, but=TEXT)
    _remove_refits(root, artifacts)
    _delete(doomed, now.number)
    remove_unreferenced(root, now)  # folders without files, which a killed writer left
    stuck = [str(file) for path in doomed for file in _files(path)]  # what is not ours, or could not be deleted
    found = tuple(dict.fromkeys([*found, *stuck]))
    return Erasure(probes.names, searched, found, tuple(_may_remember(run, now, linked)) if probes.names else ())


def _delete(segments: Sequence[Path], generation: int, but: str = "") -> None:
    """Delete the files of segments, except of the part `but`."""
    for path in segments:
        if path.parent.name == ADDED:
            _remove_parts(path, [but])
        else:
            _empty_segment(path, generation, but)


def _wait_for_readers(root: Path, now: Generation, wait: float) -> None:
    """Wait until nobody reads an older generation; refused, with who does, if that takes too long."""
    end = time.monotonic() + wait
    while readers := [lease for lease in leases_of(root) if lease.generation != now.number]:
        if time.monotonic() >= end:
            raise ArtifactError(_in_use(root, readers))
        time.sleep(POLL)


def _in_use(root: Path, readers: Sequence[Lease]) -> str:
    first = readers[0]
    more = f" (and {len(readers) - 1} more)" if len(readers) > 1 else ""
    return (
        f"{first.holder} reads generation {first.generation} of {root}{more}, which has text to be erased; refresh or "
        f"end it and run the same command again (or, if it is gone, delete {first.path})"
    )


def _is_there(segment: Path) -> bool:
    """Whether a segment has files that are not erased yet."""
    return any(_files(segment))


def _files(segment: Path) -> Iterator[Path]:
    for path in segment.rglob("*"):
        if path.is_file() and path.name not in (MANIFEST, ERASED):
            yield path


def _empty_segment(segment: Path, generation: int, but: str) -> None:
    """Delete the files of a segment that a stage built; the manifests of its parts stay, and the part `but`."""
    for part in sorted(path for path in segment.iterdir() if path.name != but):
        if part.name.startswith("."):
            with suppress(ArtifactError):
                remove_ours(part)
        elif (part / MANIFEST).is_file():
            _empty(part, list(read_manifest(part).files), generation)


def _empty(artifact: Path, names: Sequence[str], generation: int) -> None:
    """Delete files of an artifact, which says from then on that they are erased."""
    if erased_files(artifact).issuperset(names) and not any((artifact / name).exists() for name in names):
        return
    write_json(artifact / ERASED, {"generation": generation, "files": sorted({*names, *erased_files(artifact)})})
    for name in names:
        disk.remove_file(artifact / name)
    disk.sync_directory(artifact)


def _empty_first_readings(run: Run, generation: int, erasing: bool) -> None:
    """Delete the states of train text that training the base model left; nothing but training reads them."""
    if not erasing or "lm" not in run.stages:
        return
    files = run.artifact("lm").facts.get("first_reading")
    if files:
        _empty(run.path("lm"), list(files.values()), generation)


def _may_remember(run: Run, now: Generation, linked: int) -> Iterator[str]:
    """Yield what was made from erased documents and stays, by name."""
    snapshot = run.snapshot.at(now)
    for name, stage in run.stages.items():
        if what := stage.memory_of_text(snapshot, run.artifact(name), refitted=False):
            yield f"{run.path(name)}: {what}"
    for name, made in now.refitted.items():
        if what := run.stages[name].memory_of_text(snapshot, snapshot.trained(name), refitted=True):
            yield f"{run.root / made.path}: {what} with what was served then"
    for folder, what in (("analysis", "tables and figures made with it"), ("tensorboard", "training curves")):
        if (run.root / folder).is_dir():
            yield f"{run.root / folder}: {what}"
    corpus = run.config.corpus
    if source := corpus.source or corpus.train or corpus.dataset:
        yield f"{cited(source)}: the text that the corpus was built from; it is yours, and was not touched"
    if linked:
        yield f"{linked} deleted files had other names too: a fork or a copy of this run has them still"
    yield "backups and copies of the run directory, and the free space of the disk (" + os.uname().sysname + ")"
