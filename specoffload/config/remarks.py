"""Remarks of a resolution: reasons of automatic choices, and flags that change nothing."""

from __future__ import annotations

from specoffload.errors import UsageError


class Remarks:
    """Collected on the way, in order. `strict`: a typed flag that changes nothing is an error."""

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._lines: list[str] = []

    def reason(self, sentence: str) -> None:
        """Why the program chose what nobody said."""
        self._lines.append(sentence)

    def no_effect(self, name: str, why: str) -> None:
        """A flag or variable, by the name that was used, that changes nothing. Raises UsageError
        if strict: variables may be meant for other programs, so they never are an error."""
        if self._strict and name.startswith("-"):
            raise UsageError(f"{name} has no effect: {why} (--strict-flags)")
        self._lines.append(f"{name} has no effect: {why}")

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._lines))
