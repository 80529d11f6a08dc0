"""One training loop."""
