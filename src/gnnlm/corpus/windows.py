"""Which window encodes which position: the only place that decides it.

Knows nothing of models. A window reads one token (the one before it, or the start token) and tokens[start:stop], and
gives one state for each of the offsets start..stop; it keeps those from `first` on.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ends = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    start: int
    stop: int
    first: int

    @property
    def kept(self) -> int:
        return self.stop - self.first + 1


def plan_windows(tokens: int, window: int, context: int, ends: Sequence[int] | Ends = ()) -> list[Window]:
    """Cover the tokens + 1 states of a text, each once, with at least min(context, offset) tokens before it.

    A window reads at most `window` tokens, including the one before its first. `ends`, if given, are the offsets just
    after each line, in order: a window then scores whole lines, unless a line does not fit.

    >>> plan_windows(5, window=8, context=2)
    [Window(start=0, stop=5, first=0)]
    >>> plan_windows(5, window=4, context=2)
    [Window(start=0, stop=3, first=0), Window(start=2, stop=5, first=4)]
    >>> plan_windows(5, window=4, context=2, ends=[3, 5])
    [Window(start=0, stop=2, first=0), Window(start=1, stop=4, first=3), Window(start=3, stop=5, first=5)]
    """
    assert 0 <= context < window
    windows = []
    first = 0
    while first <= tokens:
        start = max(0, first - context) if first else 0
        stop = min(tokens, start + window - 1)
        line = bisect.bisect_right(ends, stop + 1) - 1  # the last line whose last token is scored by `stop` or before
        if stop < tokens and line >= 0 and ends[line] > first:
            stop = int(ends[line]) - 1
        windows.append(Window(start, stop, first))
        first = stop + 1
    return windows


def window_start(offset: int, window: int, context: int) -> int:
    """Return where the window that keeps an offset begins: `plan_windows` without `ends`, whatever follows in the text.

    >>> [window_start(offset, window=4, context=2) for offset in range(9)]
    [0, 0, 0, 0, 2, 2, 4, 4, 6]
    """
    step = window - context
    return max(0, (offset - context) // step) * step
