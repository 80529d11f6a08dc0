"""A clock that tests move by hand, so that no test depends on how fast the machine is."""

from __future__ import annotations


class Clock:
    """Stands in for the module `time` where only `monotonic` is used."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now
