"""Starts with a given crossover of MLA's two forms, which a start otherwise chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from offload.mla import ChosenCrossover


@contextmanager
def crossover_of(n_tokens: int | None) -> Iterator[None]:
    """Let starts in this block use the broadcast form up to `n_tokens`; None: they choose."""
    chosen = patch(
        "offload.opening.start.chosen_crossover", lambda *_, **__: ChosenCrossover(n_tokens or 0)
    )
    with nullcontext() if n_tokens is None else chosen:
        yield
