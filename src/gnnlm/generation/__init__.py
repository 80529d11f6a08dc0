"""Generations: what a run serves, as one small record that is replaced, never changed.

The run as its stages built it is generation 0 and has no record. Every later change of the store (documents added,
removed, replaced; segments compacted) writes `generations/N.json` and then points `CURRENT` to it. Segments never
change: a generation names the segments it is made of, which documents of each are removed, and their tags.

Readers hold a lease on the generation that they opened (`lease.py`), writers hold the run's lock.

This package does not know what the stages are, or what is in a segment.
"""

from gnnlm.generation.current import (
    commit,
    current_number,
    generations_of,
    pinned,
    read_current,
    read_generation,
)
from gnnlm.generation.lease import Lease, leases_of
from gnnlm.generation.process import Holder
from gnnlm.generation.record import Generation, RefittedArtifact, SegmentRecord

__all__ = [
    "Generation",
    "Holder",
    "Lease",
    "RefittedArtifact",
    "SegmentRecord",
    "commit",
    "current_number",
    "generations_of",
    "leases_of",
    "pinned",
    "read_current",
    "read_generation",
]
