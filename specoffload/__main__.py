"""The program's entry: `specoffload` and `python -m specoffload`.

It handles Ctrl-C and SIGTERM before it imports anything large. Without a handler, process 1 of a
container ignores SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that the caller closed (`>&-` in a shell).

    Otherwise the next file that is opened, a model's for example, would be standard error, to which
    libllama and child processes write.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _leave(number: int, _: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def main() -> None:
    """Run the command that the command line names."""
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)
    from specoffload import ctrl_c

    ctrl_c.install(*(s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is _leave))
    import contextlib

    from specoffload.cli import main as run_command

    ctrl_c.commands_begin()
    try:
        run_command()
    finally:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or a full disk
            sys.stdout.flush()
        ctrl_c.commands_have_ended()


if __name__ == "__main__":
    main()
