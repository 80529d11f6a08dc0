"""A run: a config, its directory, which of its stages are done, and snapshots of what they produced."""

from gnnlm.run import advice as advice  # sets what errors of artifacts advise
from gnnlm.run.run import Run

__all__ = ["Run"]
