"""Frozen base models behind one small protocol."""
