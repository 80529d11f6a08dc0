"""The store: position -> state, token, document, on disk."""
