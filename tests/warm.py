"""A process that has imported the large libraries, and forks for every command that the tests run.

Importing torch and transformers takes five seconds, more than most commands of the tests. A forked command is a process
of its own, with its own streams, signals and exit code. Of gnnlm, what all commands import is there before the fork;
`gnnlm_cold` in cli.py runs commands that have to import all that they use.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
from typing import Any

LIBRARIES = (
    "accelerate",
    "faiss",
    "matplotlib.figure",
    "pydantic",
    "rich.table",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "typer",
    "yaml",
    "gnnlm.book",
    "gnnlm.cli.commands",
    "gnnlm.library.library",
    "gnnlm.run.run",
)


def next_command(orders: socket.socket) -> list[str]:
    """Fork for every order until there are no more; returns in each fork, with the arguments of its command."""
    while True:
        more, files, _, _ = socket.recv_fds(orders, 1, 5)
        if not more:
            os._exit(0)  # the tests have ended
        if os.fork() == 0:
            orders.close()
            with open(files[0], "rb") as order:
                return _attended(json.load(order), socket.socket(fileno=files[1]), files[2:])
        for file in files:
            os.close(file)


def _attended(order: dict[str, Any], answers: socket.socket, streams: list[int]) -> list[str]:
    """Fork once more: one process tells the tests the number and the end of the other, which becomes the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    number = os.fork()
    if number != 0:
        for stream in streams:
            os.close(stream)
        answers.send(struct.pack("i", number))
        _, status = os.waitpid(number, 0)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            answers.send(struct.pack("i", os.waitstatus_to_exitcode(status)))
        os._exit(0)
    answers.close()
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments: list[str] = order["arguments"]
    return arguments


def _bury(*_: object) -> None:
    """Take note of forks that have ended, so that their time is counted as ours."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _run() -> None:
    """Run the command and end the process, without the half second in which Python clears large libraries."""
    code: object = 0
    try:
        if sys.argv[0] == "gnnlm":
            runpy.run_module("gnnlm", run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does first
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    del sys.path[0]  # the folder of the tests
    for library in LIBRARIES:
        importlib.import_module(library)
    os.fsync = os.fstat  # type: ignore[assignment]  # as in conftest.py
    gc.freeze()  # or every command would go through all of this when it ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest and for the commands
    signal.signal(signal.SIGCHLD, _bury)
    sys.argv = next_command(socket.socket(fileno=int(sys.argv[1])))
    _run()
