"""`fixed`: always the same number of drafted tokens. `fixed` of 0 is no speculation."""

from __future__ import annotations

from specdec.types import Round


class FixedWalk:
    __slots__ = ("_product", "gain", "limit", "n_best")
    rest = 0

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.n_best = 0
        self.gain = 0.0
        self._product = 1.0

    @property
    def wants(self) -> bool:
        return self.n_best < self.limit

    def feed(self, p: float) -> bool:
        self.n_best += 1
        self._product *= p
        self.gain += self._product
        return self.n_best < self.limit

    @property
    def reason(self) -> str:
        return f"fixed block of {self.limit}"


class Fixed:
    """Blocks of `n_max` tokens; 4 suits general text, 8 to 15 code (llama.cpp #10466)."""

    name = "fixed"
    p_top_k = 0

    def __init__(self, n_max: int = 4) -> None:
        self.n_max = n_max

    def begin(self, limit: int, source: str) -> FixedWalk:
        return FixedWalk(min(limit, self.n_max))

    def learn(self, round_: Round) -> None:
        pass
