"""Artifacts: directories that are complete or absent, record what they were made from, and can be resumed.

An artifact is a directory with a `manifest.json`: format, stage, inputs (config values and the fingerprints of
parent artifacts), facts, size and checksum of every file, and a checksum of all this. It is built in a hidden
directory next to its final place (`draft.py`) and renamed when complete (`ownership.py`). A build commits after each
shard. After a crash it resumes from the last commit, and produces the same bytes as an uninterrupted build.
Opening an artifact (`reader.py`) opens all its files: what is read later is what was verified, even if another build
has replaced the directory in the meantime.

An artifact may have parts: artifacts of their own, one for each segment of the store, which its manifest names and
which are opened with it. A part is built, resumed and checked by itself.

Every change on the disk goes through `disk.py`, which says what is synced when. The files of an artifact have digests,
large files one for each block (`blocks.py`).

This package does not know what the stages are.
"""

from gnnlm.artifact.array_writer import ArrayWriter, npy_header
from gnnlm.artifact.blocks import Array, CheckedArray
from gnnlm.artifact.concatenated import ArtifactFiles, ConcatenatedArrays, concatenate
from gnnlm.artifact.draft import Draft, found_part, make_part
from gnnlm.artifact.file_io import (
    file_digest,
    free_space,
    human_bytes,
    is_disk_full,
    require_space,
    telling,
    write_json,
    write_whole,
    writing,
)
from gnnlm.artifact.json_record import fingerprint, plain
from gnnlm.artifact.manifest import Manifest, differences, draft_path, read_manifest
from gnnlm.artifact.ownership import State, bytes_of, state_of
from gnnlm.artifact.reader import Artifact

__all__ = [
    "Array",
    "ArrayWriter",
    "Artifact",
    "ArtifactFiles",
    "CheckedArray",
    "ConcatenatedArrays",
    "Draft",
    "Manifest",
    "State",
    "bytes_of",
    "concatenate",
    "differences",
    "draft_path",
    "file_digest",
    "fingerprint",
    "found_part",
    "free_space",
    "human_bytes",
    "is_disk_full",
    "make_part",
    "npy_header",
    "plain",
    "read_manifest",
    "require_space",
    "state_of",
    "telling",
    "write_json",
    "write_whole",
    "writing",
]
