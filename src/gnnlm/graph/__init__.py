"""From rows of a neighbour table to the tensors of a heterogeneous graph."""
