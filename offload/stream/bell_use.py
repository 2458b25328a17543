"""Whether this process may use doorbells (offload/stream/doorbell.py). Loads no native code.

A doorbell lets a device wait for the host. If that has failed once, the process uses none any more.
A program that starts processes tells their successors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class NoDoorbell:
    """A message of a process that uses no doorbell any more, with the reason."""

    reason: str


class BellUse:
    """Whether doorbells may be used, and who wants to know when that ends."""

    def __init__(self) -> None:
        self.why_not = ""  # why no doorbell may be used; "": they may be
        # Functions that get the reason, on the thread that found it. They should not raise.
        self.listeners: list[Callable[[str], None]] = []

    def refuse(self, why: str) -> None:
        """Use no doorbell from now on. Only the first reason is kept and told, "" is none."""
        if self.why_not or not why:
            return
        self.why_not = why
        for listen in self.listeners:
            with suppress(Exception):  # a lost listener must not keep a hung device waiting
                listen(why)


BELLS = BellUse()  # of this process
