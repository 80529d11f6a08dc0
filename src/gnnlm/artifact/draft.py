"""An artifact being built: arrays that grow shard by shard, and a journal of what has been committed."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from gnnlm.artifact import disk
from gnnlm.artifact.array_writer import ArrayWriter, npy_header
from gnnlm.artifact.blocks import Array, crc32_of, file_entry
from gnnlm.artifact.file_io import require_space, telling, write_json
from gnnlm.artifact.json_record import plain, read_json, sealed, unsealed
from gnnlm.artifact.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    differences,
    draft_path,
    erased_files,
    read_manifest,
)
from gnnlm.artifact.ownership import (
    JOURNAL,
    NAMES,
    bytes_of,
    check_place,
    draft_names,
    is_finished,
    is_scratch,
    named,
    remove_ours,
    settle,
    state_of,
)
from gnnlm.artifact.reader import Artifact
from gnnlm.errors import ArtifactError
from gnnlm.progress import warn

SHARDS = "shards"  # the folder of a draft with finished shards that are not yet in its files


class Journal(BaseModel):
    """What a draft has committed: the size and CRC-32 of its arrays and files, and notes of the stage."""

    inputs: dict[str, Any]
    step: int = 0
    arrays: dict[str, tuple[int, int]] = {}
    files: dict[str, tuple[int, int]] = {}
    notes: dict[str, Any] = {}


class Draft:
    """An artifact being built. Use `with Draft(...) as draft`, append, commit, finish.

    Leaving the block without `finish` keeps what was committed, for the next attempt.
    """

    def __init__(
        self,
        path: Path,
        stage: str,
        inputs: Mapping[str, Any],
        *,
        rebuild: bool = False,
        waits: bool = False,
        made_with: Mapping[str, Any] | None = None,
    ) -> None:
        """`waits`: the artifact is a part, which is moved into place together with the artifact that it belongs to.

        `made_with` is recorded: what is no input, but may show in the last bit of a number.
        """
        self.path, self.stage, self.inputs = path, stage, plain(dict(inputs))
        self.folder, self._waits, self._made_with = draft_path(path), waits, dict(made_with or {})
        self._writers: dict[str, ArrayWriter] = {}
        self._parts: dict[str, str] = {}
        self._finished = False
        check_place(path)  # refuse before the long work, not after it
        journal = self._read_journal()
        if journal is not None and journal.inputs != self.inputs and not rebuild:
            raise ArtifactError(
                f"{self.folder} is half-built from other inputs ({differences(journal.inputs, self.inputs)})",
                path,
                "other inputs",
            )
        self._names = draft_names(self.folder)
        if journal is None or journal.inputs != self.inputs:
            remove_ours(self.folder)
            disk.make_directory(self.folder)
            journal = Journal(inputs=self.inputs)
            self._names = set()
            self._claim(JOURNAL, MANIFEST)
        self._journal = journal
        self.resumed = bool(journal.step)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()
        if self._finished:
            return
        with suppress(OSError, ArtifactError):  # the exception being raised says more
            self._claim_all()
            if self.step == 0:  # nothing to resume from
                remove_ours(self.folder)

    @property
    def step(self) -> int:
        """The number of commits, over all attempts."""
        return self._journal.step

    @property
    def notes(self) -> dict[str, Any]:
        """Small JSON values that survive a crash together with the arrays."""
        return self._journal.notes

    def file(self, name: str) -> Path:
        """Return the path of a file or folder that is about to be written.

        The draft records the name before the file exists: after a kill it can tell its own files from others, and
        refuses to remove others.
        """
        self._claim(name)
        return self.folder / name

    @property
    def shards(self) -> Path:
        """The folder for files of shards, which a resumed build finds."""
        return self.file(SHARDS)

    def _claim(self, *names: str) -> None:
        if not self._names.issuperset(names):
            self._names.update(names)
            write_json(self.folder / NAMES, named(sorted(self._names)))

    def _claim_all(self) -> None:
        """Record every file in the folder as this build's own: the folder was empty when the build began."""
        self._claim(*(path.name for path in self.folder.iterdir() if not path.name.endswith(".new")))

    def writer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> ArrayWriter:
        """Return a writer that appends rows to an array of known shape, after those of the last commit."""
        writer = ArrayWriter(self.file(name), shape, np.dtype(dtype), self._journal.arrays.get(name))
        self._writers[name] = writer
        return writer

    def save(self, name: str, array: Array) -> None:
        """Write a whole array, by plain writes: numpy's own miss a disk that fills up at the last buffer."""
        array = np.ascontiguousarray(array)
        assert not array.dtype.hasobject
        with telling(self.file(name)), disk.create(self.folder / name) as file:
            disk.write(file, npy_header(array.shape, array.dtype))
            disk.write(file, array.data)
            disk.sync(file)

    def write_bytes(self, name: str, data: bytes | bytearray) -> None:
        with telling(self.file(name)):
            disk.write_file(self.folder / name, data)

    def part(self, name: str, inputs: Mapping[str, Any], build: Callable[[Draft], Mapping[str, Any]]) -> None:
        """Build a part unless it is finished; `name` is its path in the run directory."""
        if not self.step:
            self.commit()  # there is something to resume from now
        self.add_part(name, make_part(self.path.parent / name, inputs, build, self._made_with))

    def require_space(self, parts: Mapping[str, tuple[Mapping[str, Any], int]], own: int, what: str) -> None:
        """Refuse when the disk cannot hold the artifact: its own bytes, and the bytes of parts with these inputs.

        Parts that are in place and made from these inputs take no more space, nor does what an earlier attempt has
        left.
        """
        needed = own - self.bytes_there
        for name, (inputs, size) in parts.items():
            place = self.path.parent / name
            if state_of(place, inputs) != "done":
                needed += size - bytes_of(draft_path(place))
        require_space(self.folder, needed, what)

    def add_part(self, name: str, fingerprint: str) -> None:
        """Record a part that `make_part` built, here or elsewhere; parts keep this order."""
        self._parts[name] = fingerprint

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode())

    @property
    def bytes_there(self) -> int:
        """The bytes that an earlier attempt has left on the disk."""
        return sum(f.stat().st_size for f in self.folder.iterdir() if f.is_file())

    def commit(self, *names: str, without: Sequence[str] = ()) -> None:
        """Make everything appended so far survive a crash, and these files, or the files in these folders.

        The next attempt relies on them and on those of earlier commits, `without` some: it starts over if they are not
        what they are now.
        """
        self._claim_all()
        for name, writer in self._writers.items():
            self._journal.arrays[name] = writer.sync()
        files = self._journal.files
        for name in [name for name in files if Path(name).parts[0] in without]:
            del files[name]
        for name in names:
            disk.sync_tree(self.folder / name)
            for file in _files_below(self.folder / name):
                files[str(file.relative_to(self.folder))] = file.stat().st_size, crc32_of(file)
        disk.sync_directory(self.folder)
        self._journal.step += 1
        write_json(self.folder / JOURNAL, sealed(plain(self._journal.model_dump())))

    def finish(self, facts: Mapping[str, Any], files: Sequence[str] | None = None) -> Artifact:
        """Check the artifact, write its manifest and move it into place; with `files`, all other files are removed."""
        for writer in self._writers.values():
            writer.sync()
            writer.check_whole()
            writer.close()
        self._claim_all()
        disk.remove_tree(self.folder / SHARDS)
        if files is None:
            ours = (NAMES, JOURNAL, MANIFEST)
            names = (p.name for p in self.folder.iterdir() if p.suffix != ".new" and not is_scratch(p.name))
            files = sorted(name for name in names if name not in ours)
        mode = stat.S_IMODE((self.folder / NAMES).stat().st_mode)
        for name in files:  # safetensors creates files that only their owner may read
            if stat.S_IMODE((self.folder / name).stat().st_mode) != mode:
                disk.set_mode(self.folder / name, mode)
            disk.sync_file(self.folder / name)
        disk.sync_directory(self.folder)
        entries = {name: file_entry(self.folder / name) for name in files}
        manifest = Manifest(
            format=FORMAT,
            stage=self.stage,
            inputs=self.inputs,
            facts=dict(facts),
            files=entries,
            parts=self._parts,
            made_with=self._made_with,
        )
        write_json(self.folder / MANIFEST, manifest.as_json())
        self._finished = True  # from here on the artifact is complete, wherever it is
        if self._waits:
            return Artifact.open(self.folder, verify=False)
        settle(self.path)
        return Artifact.open(self.path, verify=False)

    def _read_journal(self) -> Journal | None:
        """Return the journal of an earlier attempt; None if there is none, or if it cannot be resumed."""
        if not (self.folder / JOURNAL).is_file():
            return None
        try:
            journal = Journal.model_validate(unsealed(read_json(self.folder / JOURNAL)))
            for name, (size, digest) in journal.arrays.items():
                if (self.folder / name).stat().st_size < size:
                    raise ValueError(f"{name} is cut short")
                if crc32_of(self.folder / name, size) != digest:
                    raise ValueError(f"{name} is damaged")
            for name, entry in journal.files.items():
                if ((self.folder / name).stat().st_size, crc32_of(self.folder / name)) != entry:
                    raise ValueError(f"{name} is damaged")
        except (OSError, ValueError) as error:
            why = "its journal was changed after it was written" if isinstance(error, ValidationError) else error
            warn(f"{self.folder} has lost or damaged data, so this stage starts over ({why})")
            return None
        return journal


def make_part(
    path: Path,
    inputs: Mapping[str, Any],
    build: Callable[[Draft], Mapping[str, Any]],
    made_with: Mapping[str, Any] | None = None,
) -> str:
    """Make an artifact that is part of another, and return its fingerprint; `build` fills a draft and returns facts.

    A part that was made from the same inputs is found, not made again, whether it is in place or waits for the
    artifact that it belongs to. One in place is hashed to the last byte first: a rebuild must not keep damage.
    """
    if found := found_part(path, inputs):
        return found
    with Draft(path, path.name, inputs, rebuild=True, waits=True, made_with=made_with) as draft:
        return draft.finish(build(draft)).fingerprint


def found_part(path: Path, inputs: Mapping[str, Any]) -> str | None:
    """The fingerprint of a whole part that was made from these inputs; None if there is none, or if it was erased."""
    places = [(path, False)]
    if is_finished(path):
        places.insert(0, (draft_path(path), True))
    for folder, trust in places:
        with suppress(ArtifactError):  # not there, or damaged
            if read_manifest(folder).inputs == plain(dict(inputs)) and not erased_files(folder):
                return Artifact.open(folder, trust=trust).fingerprint
    return None


def _files_below(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
