"""The program's entry: `specoffload` and `python -m specoffload`.

It handles Ctrl-C before it imports anything large.
"""

from __future__ import annotations

import os
import signal


def _leave(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command that the command line names."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from specoffload import ctrl_c

    if signal.getsignal(signal.SIGINT) is _leave:
        ctrl_c.install()
    import contextlib
    import sys

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
