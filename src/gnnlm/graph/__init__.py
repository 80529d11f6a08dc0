"""Neighbour table rows -> the tensors of a heterogeneous graph, and nothing else."""
