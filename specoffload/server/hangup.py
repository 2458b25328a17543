"""Tells the two meanings of SIGHUP apart: the terminal is closed, or the log was rotated.

The kernel sends it to the programs of a closed terminal (setsid(2), signal(7)). By convention,
administrators send it to servers whose log file was moved away.
"""

from __future__ import annotations

import os
import select
import signal


class Terminal:
    """The terminal that this process was started at, if any."""

    def __init__(self) -> None:
        """Look at the standard streams now.

        `is_needed` is False under `nohup`, which lets programs outlive their terminal.
        """
        self.is_needed = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._descriptors = tuple(filter(os.isatty, range(3)))

    def is_closed(self) -> bool:
        """True if there was a terminal, and it is closed."""
        poll = select.poll()
        for descriptor in self._descriptors:
            poll.register(descriptor, 0)  # hang-ups are always reported
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def leave(self) -> None:
        """Redirect the standard streams of a closed terminal to nowhere, so that writes work."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._descriptors:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
