"""Looking for erased documents in the files of a run: pieces of their text, their tokens and their states, as bytes."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gnnlm.artifact import Artifact, ArtifactFiles
from gnnlm.corpus.stream import TEXT, Stream
from gnnlm.errors import ArtifactError
from gnnlm.generation import Generation, generations_of
from gnnlm.layout import ADDED, SEGMENTS
from gnnlm.library.catalogue import text_of
from gnnlm.run import Run

LETTERS = 24  # of a piece of text
TOKENS = 12  # of a piece of a token stream
ROWS = 64  # of each document whose states are looked for
LEAST_ROW = 16  # bytes of a row of states that tell it from any other
SCANNED = 2**37  # bytes that are looked at in all: pieces times the size of the run
FEWEST, MOST = 32, 4096  # pieces
KINDS, FOLDERS = ("states", "codes", "cache"), (SEGMENTS, ADDED)  # parts with rows, and where segments lie


@dataclass(frozen=True)
class ErasedSamples:
    """Pieces of erased documents that occur in no remaining document, and the names of the erased documents."""

    names: tuple[str, ...]
    pieces: tuple[bytes, ...]

    @classmethod
    def of(cls, run: Run, doomed: Sequence[Path], now: Generation) -> ErasedSamples:
        """Return pieces of the segments to be deleted that occur in no remaining document."""
        stays = _RemainingContent(run, now)
        names: list[str] = []
        found: list[list[bytes]] = [[], [], []]
        for segment in doomed:
            try:
                text = Artifact.open(segment / TEXT)
                stream = Stream(text, "train", [ArtifactFiles(text)])
            except ArtifactError:  # unfinished, or erasing it was interrupted
                continue
            arrays = list(_arrays(run.root, *_parts_of(run, segment)))
            for number, (name, document) in enumerate(zip(stream.names, stream.documents, strict=True)):
                if (name, document.text) in stays.documents:
                    continue
                names.append(name)
                first, last = stream.starts[number : number + 2].tolist()
                found[0] += stays.new_text(document.text)
                found[1] += stays.new_tokens(np.asarray(stream.tokens[first : last - 1]))
                step = 1 + (last - first) // ROWS
                found[2] += [array[row].tobytes() for array in arrays for row in range(first + 1, last, step)]
        found[2] = stays.new_rows(found[2])
        size = sum(path.stat().st_size for path in _all_files(run.root))
        most = min(MOST, max(FEWEST, SCANNED // max(1, size)))
        return cls(tuple(names), tuple(piece for kind in found for piece in _spread(kind, most // 3)))

    def search(self, root: Path, goes: Callable[[Path], bool]) -> tuple[tuple[str, ...], int]:
        """Return the remaining files that hold any of the pieces, and how many bytes were searched."""
        found, searched = [], 0
        for path in _all_files(root) if self.pieces else ():
            if goes(path):
                continue
            size = path.stat().st_size
            searched += size
            if size and _holds(path, self.pieces):
                found.append(str(path))
        return tuple(found), searched


class _RemainingContent:
    """The content that stays; a piece that occurs in it proves nothing."""

    def __init__(self, run: Run, now: Generation) -> None:
        self.documents: set[tuple[str, str]] = set()
        snapshot = run.snapshot.at(now)
        streams = [text_of(snapshot, segment) for segment in now.segments]
        removed_of = [set(segment.removed) for segment in now.segments]
        for held_out in snapshot.held_out.values():
            streams.append(held_out)
            removed_of.append(set())
        for removed, stream in zip(removed_of, streams, strict=True):
            for number, document in enumerate(stream.documents):
                if number not in removed:
                    self.documents.add((document.name, document.text))
        self._text = "\0".join(text for _, text in self.documents)
        self._tokens = b"".join(np.asarray(stream.tokens).tobytes() for stream in streams)
        self._arrays = list(_arrays(run.root, *sorted(now.paths)))
        encoded = run.artifact("encode")
        self._arrays += [encoded.array(name) for name in encoded.manifest.files if name.endswith(".npy")]

    def new_text(self, text: str) -> list[bytes]:
        pieces = {text[start : start + LETTERS] for start in range(0, max(1, len(text) - LETTERS + 1), LETTERS // 2)}
        new = [piece for piece in sorted(pieces) if len(piece) == LETTERS and piece not in self._text]
        spelled = {form for piece in new for form in (piece, json.dumps(piece, ensure_ascii=False)[1:-1])}
        return [form.encode("utf-8", "surrogatepass") for form in sorted(spelled)]

    def new_tokens(self, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[bytes]:
        starts = range(0, max(0, len(tokens) - TOKENS + 1), TOKENS // 2)
        pieces = {tokens[start : start + TOKENS].tobytes() for start in starts}
        return [piece for piece in sorted(pieces) if piece not in self._tokens]

    def new_rows(self, rows: Sequence[bytes]) -> list[bytes]:
        """Return the rows of states that no remaining document has."""
        left = {row for row in rows if len(row) >= LEAST_ROW and any(row)}
        for array in self._arrays:
            for start in range(0, len(array), 65_536):
                block = np.ascontiguousarray(array[start : start + 65_536])
                left -= {row.tobytes() for row in block}
        return sorted(left)


def _parts_of(run: Run, segment: Path) -> list[str]:
    """Return the paths of a segment's parts: its own, and those that refits have made for it."""
    name = str(segment.relative_to(run.root))
    held = [each for one in generations_of(run.root) for each in one.segments if each.name == name]
    return sorted({f"{name}/{kind}" for kind in KINDS} | {each.path_of(kind) for each in held for kind in each.parts})


def _arrays(root: Path, *parts: str) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.float16]]]:
    """Yield the arrays that have a row for every position: states, keys, codes, tables of the cache."""
    for path in (Path(part) for part in parts):
        try:
            part = Artifact.open(root / path) if path.name in KINDS and path.parent.parent.name in FOLDERS else None
            yield from [part.array(name) for name in part.manifest.files if name.endswith(".npy")] if part else ()
        except ArtifactError:  # not there, or erased
            continue


def _spread(pieces: Sequence[bytes], most: int) -> Sequence[bytes]:
    """Return at most this many pieces, evenly spaced."""
    step = -(-len(pieces) // most) if pieces else 1
    return pieces[::step]


def _all_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


def _holds(path: Path, pieces: Sequence[bytes]) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return any(data.find(piece) >= 0 for piece in pieces)
