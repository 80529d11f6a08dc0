"""A check that all machines of a cluster have the same software, models and storage."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import gnnlm

PACKAGES = ("torch", "faiss-cpu", "transformers", "numpy")
MISSING = "missing"


@dataclass(frozen=True)
class MachineRequirements:
    """What a machine needs: models, each with a function that identifies its files, and a file that must be visible."""

    models: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    file: Path | None = None

    def facts(self) -> dict[str, str]:
        """Return what this machine has."""
        found = versions() | {f"model {name}": identify() for name, identify in self.models.items()}
        if self.file is not None:
            found["file"] = "there" if self.file.exists() else MISSING
        return found


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of the packages that a run's numbers depend on."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "gnnlm": f"{gnnlm.__version__} ({source()})"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = MISSING
    return found


def source() -> str:
    """Return eight hex digits that identify the source files of gnnlm, which may differ within a version."""
    folder = Path(gnnlm.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def difference(node: str, here: Mapping[str, str], there: Mapping[str, str], root: Path) -> str | None:
    """Return what another machine lacks, with what to do about it; None if nothing.

    >>> difference("node 2", {"torch": "2.6.0"}, {"torch": "2.5.1"}, Path("runs/mine"))
    'node 2 has torch 2.5.1, this machine 2.6.0; install the same version on all machines'
    """
    for name, value in here.items():
        found = there.get(name, MISSING)
        if found == value:
            continue
        if name == "file":
            return (
                f"{node} does not see {root}; choose a run directory (run: in the config) on storage that all machines "
                "share, or name storage that all can reach with --storage"
            )
        if name.startswith("model "):
            lacks = "lacks" if found == MISSING else "has other files for"
            return f"{node} {lacks} the {name}; put the same files at the same place on all machines"
        return f"{node} has {name} {found}, this machine {value}; install the same version on all machines"
    return None


def pin_threads(threads: int) -> None:
    """Set the number of threads to compute with; another number may round differently."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)  # for libraries that are not loaded yet
    import torch

    torch.set_num_threads(threads)
