"""The entry point: every error is one line, and says what to do."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from gnnlm.errors import GnnlmError

INTERRUPTED = "interrupted; what was finished is kept: the same command goes on from there"
_signals: list[int] = []  # that have come


class Interrupted(BaseException):
    """Ctrl-C or a polite kill. Not an Exception, so that nothing on the way takes it for a failure of its own."""


def _interrupt(number: int, _: object) -> None:
    _signals.append(number)
    raise Interrupted


def _leave(*_: object) -> None:
    """While the commands are imported nothing is under way, and an exception might end up in somebody's import."""
    os.write(2, f"error: {INTERRUPTED}\n".encode())
    os._exit(130)


def _on_signal(handler: Callable[..., None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def main() -> None:
    """Entry point: every error is one line, and says what to do."""
    try:
        _on_signal(_leave)
        from gnnlm.cli.app import app

        _on_signal(_interrupt)
        app(standalone_mode=True)
    except GnnlmError as error:
        _fail(" ".join(str(error).split()))
    except (Interrupted, KeyboardInterrupt):
        _fail(INTERRUPTED, code=130)
    except OSError as error:
        from gnnlm.artifact import is_disk_full

        if is_disk_full(error):
            _fail("the disk is full; free some space and run the same command again: it goes on where it stopped")
        if error.filename is None:
            _unexpected(error)
        _fail(f"{error.filename}: {error.strerror}; check that it is there and that you may read and write it")
    except Exception as error:
        _unexpected(error)
    finally:
        _on_signal(signal.SIG_DFL)  # all is said: what is left of the program may be cut short without a word


def _unexpected(error: Exception) -> None:
    if _signals:  # a library has made an exception of its own of ours
        _fail(INTERRUPTED, code=130)
    if os.environ.get("GNNLM_DEBUG"):
        raise error
    words = " ".join(str(error).split())[:300]
    _fail(f"unexpected {type(error).__name__}: {words} (this is a bug: GNNLM_DEBUG=1 shows where)")


def _fail(message: str, code: int = 1) -> None:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)
