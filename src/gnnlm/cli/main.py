"""The entry point: every error is one line that says what to do."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable

from gnnlm.errors import GnnlmError, Interrupted

# Everything else is imported within `main`, which reports a Ctrl-C during the imports in one line.
INTERRUPTED = "interrupted; finished work is kept, and the same command resumes where it stopped"
_signals: list[int] = []  # received so far


def _interrupt(number: int, _: object) -> None:
    _signals.append(number)
    raise Interrupted


def _leave(*_: object) -> None:
    """Exit at once: during the imports no work can be lost, and an exception might be swallowed by an import."""
    os.write(2, f"error: {INTERRUPTED}\n".encode())
    os._exit(130)


def _on_signal(handler: Callable[..., None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def main() -> None:
    """Run the command line; every error becomes one line that says what to do."""
    try:
        _on_signal(_leave)
        from gnnlm.cli.commands import app
        from gnnlm.cli.terminal import show_messages

        show_messages()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _join(app)
        else:
            _on_signal(_interrupt)
            app(standalone_mode=True)
    except GnnlmError as error:
        _fail(" ".join(str(error).split()))
    except (Interrupted, KeyboardInterrupt):
        _fail(INTERRUPTED, code=130)
    except OSError as error:
        from gnnlm.artifact import is_disk_full

        if is_disk_full(error):
            _fail("the disk is full; free some space and run the same command again: it resumes where it stopped")
        if error.filename is None:
            _unexpected(error)
        _fail(f"{error.filename}: {error.strerror}; check that it exists and that you may read and write it")
    except Exception as error:
        _unexpected(error)
    finally:
        gc.freeze()  # or the interpreter goes through everything in torch and transformers before it ends
        _on_signal(signal.SIG_DFL)  # all messages are printed: from here on a signal may end the process silently


def _join(app: Callable[..., object]) -> None:
    """Run the command in the first of the processes that a launcher started; the others join in when it trains."""
    from gnnlm.run.follow import follow
    from gnnlm.train.processes import joined

    _on_signal(_interrupt)
    with joined() as here:
        if here.first:
            app(standalone_mode=True)
            return
        try:
            follow(here)
        except (GnnlmError, Interrupted):
            raise SystemExit(1) from None  # the first process has printed why


def _unexpected(error: Exception) -> None:
    if _signals:  # a library has turned our exception into one of its own
        _fail(INTERRUPTED, code=130)
    if os.environ.get("GNNLM_DEBUG"):
        raise error
    words = " ".join(str(error).split())[:300]
    _fail(f"unexpected {type(error).__name__}: {words} (this is a bug; set GNNLM_DEBUG=1 for the traceback)")


def _fail(message: str, code: int = 1) -> None:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)
