"""Learns how much faster a decode is if the decode before it had as many rows.

libllama builds and allocates its graph anew if the number of rows changes. That takes some 10 us a
layer, which weighs most where a decode is short.
"""

from __future__ import annotations

_LEAST_SEEN = 3  # decodes of a size, of either kind, from which its difference counts
_MEMORY = 0.1  # weight of the newest decode


class _SizeMeans:
    """Mean seconds of decodes of one size, by whether the decode before had it too."""

    __slots__ = ("means_s", "n_seen")

    def __init__(self) -> None:
        self.means_s = [0.0, 0.0]
        self.n_seen = [0, 0]

    def add(self, seconds: float, *, is_same: bool) -> None:
        self.n_seen[is_same] += 1
        weight = max(_MEMORY, 1.0 / self.n_seen[is_same])
        # A decode that another program disturbed may take many times as long.
        if self.n_seen[is_same] > _LEAST_SEEN:
            seconds = min(seconds, 2.0 * self.means_s[is_same])
        self.means_s[is_same] += weight * (seconds - self.means_s[is_same])


class SameSize:
    """Mean seconds that repeating a size saves. `n_rows`: rows of the last decode."""

    def __init__(self) -> None:
        self.n_rows = 0
        self._sizes: dict[int, _SizeMeans] = {}

    def observe(self, n_rows: int, seconds: float) -> None:
        """Learn from a decode of `n_rows` rows."""
        size = self._sizes.get(n_rows)
        if size is None:
            size = self._sizes[n_rows] = _SizeMeans()
        size.add(seconds, is_same=n_rows == self.n_rows)
        self.n_rows = n_rows

    @property
    def saved_s(self) -> float:
        """The seconds saved, as a mean over the sizes that were seen both ways; 0 if unknown."""
        total, weights = 0.0, 0
        for size in self._sizes.values():
            weight = min(size.n_seen)
            if weight >= _LEAST_SEEN:
                total += weight * (size.means_s[0] - size.means_s[1])
                weights += weight
        return max(0.0, total / weights) if weights else 0.0
