"""Holds the ways that an engine's batches take now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from offload.times.ways import Ways


class WaysInUse:
    """The ways that all devices of an engine take, and their executors: a value that is replaced.

    libllama reuses the previous decode's graph for a batch of the same size, so a graph is built by
    new ways only after one of another size (`Engine.build_anew`).
    """

    def __init__(self, ways: Ways) -> None:
        self.now = ways

    def use(self, ways: Ways) -> None:
        """Take these ways from now on."""
        self.now = ways

    def change(self, **changes: Any) -> None:
        """Take other values of these fields of `Ways` from now on."""
        self.now = replace(self.now, **changes)

    def decline(self, why: str) -> None:
        """Split no layer of this model, because of `why`."""
        self.change(declined=why)

    @contextmanager
    def trying(self, ways: Ways) -> Iterator[None]:
        """Take these ways inside the context. What was declined meanwhile stays declined."""
        before, self.now = self.now, ways
        try:
            yield
        finally:
            self.now = replace(before, declined=self.now.declined)
