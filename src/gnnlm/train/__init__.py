"""One training loop, for the graph network and for base models."""
