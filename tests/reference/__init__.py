"""Slow, obvious versions of the mathematics, written with loops; the oracles of the tests."""
