"""Who is scored where: the only place that decides which window encodes which position.

Knows nothing of models. A window reads `start token + tokens[start:stop]` and gives one state for each of
the positions start..stop; it keeps those from `first` on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    start: int
    stop: int
    first: int

    @property
    def kept(self) -> int:
        return self.stop - self.first + 1


def plan_windows(tokens: int, window: int, context: int) -> list[Window]:
    """Cover the tokens + 1 states of a document, each once, with at least min(context, offset) tokens before it.

    A window holds `window` tokens including the start token.

    >>> plan_windows(5, window=8, context=2)
    [Window(start=0, stop=5, first=0)]
    >>> plan_windows(5, window=4, context=2)
    [Window(start=0, stop=3, first=0), Window(start=2, stop=5, first=4)]
    """
    assert 0 <= context < window
    windows = []
    first = 0
    while first <= tokens:
        start = max(0, first - context) if first else 0
        stop = min(tokens, start + window - 1)
        windows.append(Window(start, stop, first))
        first = stop + 1
    return windows
