"""From text (files, benchmarks, datasets, Python's documentation) to documents, splits and token streams."""
