"""Text files and Python's own documentation -> documents, split and cleaned; with a tokenizer, token streams."""
