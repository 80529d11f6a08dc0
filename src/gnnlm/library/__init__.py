"""The documents of a run: added, removed, replaced and erased after it was built.

A run's trained parts stay as they are, until they are fitted again; its store changes from one generation to the next.
"""
