"""Indexes over the store, and the neighbour tables that are filled from them."""
