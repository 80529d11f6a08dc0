"""FAISS indexes over the store and the neighbour tables they fill. FAISS is imported here only."""
