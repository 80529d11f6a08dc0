"""What is left on disk of removed documents: half-erased segments, and texts that no generation serves."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gnnlm.artifact import Artifact
from gnnlm.artifact.manifest import ERASED, MANIFEST, erased_files
from gnnlm.corpus.stream import TEXT
from gnnlm.errors import ArtifactError
from gnnlm.generation import Generation, leases_of, read_generation
from gnnlm.layout import ADDED


def erased_segments(built: Iterable[Artifact]) -> dict[str, bool]:
    """Return the segments that were erased, at least in part, and whether none of their files is left."""
    found: dict[str, bool] = {}
    for part in (part for artifact in built for part in artifact.parts):
        if erased_files(part.path):
            segment = part.path.parent
            found[segment.name] = all(path.name in (MANIFEST, ERASED) for path in segment.glob("*/*"))
    return found


def needed_paths(root: Path, now: Generation) -> set[str]:
    """Return the paths of the artifacts that this generation, or the generation of any reader, has."""
    found = now.paths
    for lease in leases_of(root):
        with suppress(ArtifactError):
            found |= read_generation(root, lease.generation).paths
    return found


def unserved_texts(root: Path, now: Generation) -> list[Path]:
    """Return the texts of added segments that no generation in use has; those of a writer at work are left out."""
    if not now.number:
        return []
    needed = needed_paths(root, now)
    made = [text for text in sorted((root / ADDED).glob(f"*/{TEXT}")) if text.parent.name.split(".")[0].isdigit()]
    old = [text for text in made if int(text.parent.name.split(".")[0]) <= now.number]
    return [text for text in old if str(text.relative_to(root)) not in needed]
