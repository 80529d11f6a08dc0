"""Tuning on valid, the report on test."""
