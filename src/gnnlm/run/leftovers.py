"""What is left on the disk of documents that were removed: segments half erased, texts that nothing serves any more."""

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
    """The segments of stages that were erased, at least some parts of each; whether none of its files is left."""
    found: dict[str, bool] = {}
    for part in (part for artifact in built for part in artifact.parts):
        if erased_files(part.path):
            segment = part.path.parent
            found[segment.name] = all(path.name in (MANIFEST, ERASED) for path in segment.glob("*/*"))
    return found


def needed_paths(root: Path, now: Generation) -> set[str]:
    """The artifacts, by path in the run directory, that a generation or a reader's generation has."""
    found = now.paths
    for lease in leases_of(root):
        with suppress(ArtifactError):
            found |= read_generation(root, lease.generation).paths
    return found


def unserved_texts(root: Path, now: Generation) -> list[Path]:
    """Texts of added segments that neither the generation nor a reader's has; a writer's next ones are left out."""
    if not now.number:
        return []
    needed = needed_paths(root, now)
    made = [text for text in sorted((root / ADDED).glob(f"*/{TEXT}")) if text.parent.name.split(".")[0].isdigit()]
    old = [text for text in made if int(text.parent.name.split(".")[0]) <= now.number]
    return [text for text in old if str(text.relative_to(root)) not in needed]
