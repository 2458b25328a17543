"""Stop sequences in streamed text: nothing after one is shown, and none is shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Holds back text that may turn out to be the beginning of a stop sequence."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.word: str | None = None  # the stop sequence that came

    @property
    def stopped(self) -> bool:
        return self.word is not None

    def feed(self, text: str) -> str:
        """The text that may be shown now; after a stop sequence, nothing more."""
        if not self._stops:
            return text
        if self.stopped:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.word = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._longest_beginning()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """The text held back, at the end of one that did not stop."""
        shown, self._held = self._held, ""
        return shown

    def _longest_beginning(self) -> int:
        best = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(self._held)), best, -1):
                if self._held.endswith(stop[:n]):
                    best = n
                    break
        return best
