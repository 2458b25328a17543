"""Times actions, decodes, and several ways that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    # Looked up at each call, because virtual time replaces the clock.
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def decode_s(sequences: Any, tokens: Sequence[int], n_logits: int | None = None) -> float:
    """Return the seconds in which the first sequence is extended by `tokens`."""
    return seconds(lambda: sequences.extend(0, tokens, n_logits))


def by_turns(
    ways: Mapping[Name, Callable[[int], Result]], n_rounds: int, *, n_warm: int = 0
) -> dict[Name, list[Result]]:
    """Return the results of each way, by its name, after `n_warm` rounds that count for nothing.

    The ways take turns, so that a change of the machine's speed meets all of them. Each is called
    with the number of the round.
    """
    results: dict[Name, list[Result]] = {name: [] for name in ways}
    for nth in range(n_warm + n_rounds):
        for name, way in ways.items():
            result = way(nth)
            if nth >= n_warm:
                results[name].append(result)
    return results
