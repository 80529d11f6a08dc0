"""The entry point: every error is one line, and says what to do."""

from __future__ import annotations

import os
import signal
import sys

from gnnlm.errors import GnnlmError


class Interrupted(BaseException):
    """Ctrl-C or a polite kill. Not an Exception, so that nothing on the way takes it for a failure of its own."""


def _interrupt(*_: object) -> None:
    raise Interrupted


def main() -> None:
    """Entry point: every error is one line, and says what to do."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        from gnnlm.cli.app import app

        app(standalone_mode=True)
    except GnnlmError as error:
        _fail(" ".join(str(error).split()))
    except Interrupted:
        _fail("interrupted; what was finished is kept: the same command goes on from there", code=130)
    except OSError as error:
        from gnnlm.artifact import is_disk_full

        if is_disk_full(error):
            _fail("the disk is full; free some space and run the same command again: it goes on where it stopped")
        if error.filename is None:
            _unexpected(error)
        _fail(f"{error.filename}: {error.strerror}; check that it is there and that you may read and write it")
    except Exception as error:
        _unexpected(error)


def _unexpected(error: Exception) -> None:
    if os.environ.get("GNNLM_DEBUG"):
        raise error
    words = " ".join(str(error).split())[:300]
    _fail(f"unexpected {type(error).__name__}: {words} (this is a bug: GNNLM_DEBUG=1 shows where)")


def _fail(message: str, code: int = 1) -> None:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)
