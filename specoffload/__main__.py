"""Where the program begins: `specoffload` and `python -m specoffload`.

Ctrl-C is taken over before anything else is imported.
"""

from __future__ import annotations

import contextlib
import sys

from specoffload import ctrl_c


def main() -> None:
    """Run the command that the words name."""
    ctrl_c.install()
    from specoffload.cli import main as run_command

    ctrl_c.commands_begin()
    try:
        run_command()
    finally:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            sys.stdout.flush()
        ctrl_c.commands_have_ended()


if __name__ == "__main__":
    main()
