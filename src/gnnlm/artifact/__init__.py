"""Artifacts: directories that are complete or absent, record what they were made from, and can be resumed.

An artifact is a directory with a `manifest.json`: format, stage, inputs (config values and the fingerprints of
parent artifacts), facts, size and checksum of every file, and a checksum of all this. It is built in a hidden
directory next to its final place (`draft.py`) and renamed when complete (`place.py`). A build commits after each shard.
After a crash it resumes from the last commit, and produces the same bytes as a build that was never interrupted.
Opening an artifact (`reading.py`) opens all its files: what is read later is what was verified, even if another build
has replaced the directory in the meantime.

This package does not know what the stages are.
"""

from gnnlm.artifact.draft import ArrayWriter, Draft
from gnnlm.artifact.files import human_bytes, is_disk_full, require_space, write_json, write_whole, writing
from gnnlm.artifact.manifest import differences, fingerprint, manifest_fingerprint, plain, read_manifest
from gnnlm.artifact.place import State, draft_path, state_of
from gnnlm.artifact.reading import Array, Artifact

__all__ = [
    "Array",
    "ArrayWriter",
    "Artifact",
    "Draft",
    "State",
    "differences",
    "draft_path",
    "fingerprint",
    "human_bytes",
    "is_disk_full",
    "manifest_fingerprint",
    "plain",
    "read_manifest",
    "require_space",
    "state_of",
    "write_json",
    "write_whole",
    "writing",
]
