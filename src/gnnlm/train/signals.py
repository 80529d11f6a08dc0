"""Ctrl-C and SIGTERM during training, delayed until the current step is done and saved."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

HELD = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping after this step, which will be saved (press Ctrl-C again to stop at once)\n"


class SignalDelay:
    """Within the block, a first signal only sets `pending`; a second one takes effect at once.

    Python delivers signals to the main thread only, so nothing is delayed in other threads. An ignored signal stays
    ignored. With `quiet`, no notice is printed, because another process prints it.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.pending: signal.Signals | None = None
        self._quiet = quiet
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalDelay:
        if threading.current_thread() is threading.main_thread():
            for number in HELD:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._hold)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.release()
        self._restore()

    def release(self) -> None:
        """Deliver the delayed signal, if there is one."""
        if self.pending is not None:
            self._deliver(self.pending)

    def _hold(self, number: int, _: FrameType | None) -> None:
        if self.pending is not None:
            self._deliver(signal.Signals(number))
            return
        self.pending = signal.Signals(number)
        if self._quiet:
            return
        with suppress(OSError):
            os.write(2, NOTICE)  # a handler may run inside a print, so it must not print itself

    def _deliver(self, number: signal.Signals) -> None:
        before = self._before.get(number)
        self._restore()
        self.pending = None
        if callable(before):
            before(number, None)
        else:
            signal.raise_signal(number)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
