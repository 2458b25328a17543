"""`p-min`: draft while each token's own probability is at least p_min; llama.cpp's present rule.

The weak token itself is not kept, and a draft shorter than n_min is dropped. The old
rule pushed it before testing, so that every draft had a token that nearly always failed (found in
llama.cpp #10466);
`push_before_test` reproduces that and exists for the test that documents it.
"""

from __future__ import annotations

from specdec.options import P_TOP_K
from specdec.policies.walk import ProductWalk
from specdec.types import Round


class PMinWalk(ProductWalk):
    __slots__ = ("_n_min", "_p_min", "_push_before_test")

    def __init__(self, limit: int, p_min: float, n_min: int, push_before_test: bool) -> None:
        super().__init__(limit)
        self._p_min, self._n_min = p_min, n_min
        self._push_before_test = push_before_test

    def _judge(self, p: float) -> bool:
        weak = p < self._p_min
        # The cap is tested before p_min, so a capped draft keeps its last token.
        kept = self.n if not weak or self._push_before_test else self.n - 1
        self.n_best = kept if kept >= self._n_min else 0
        self.reason = f"p {p:.2f} below {self._p_min:g}" if weak else "longest draft"
        return not weak


class PMin:
    name = "p-min"

    def __init__(
        self,
        n_max: int = 16,
        p_min: float = 0.75,
        n_min: int = 0,
        *,
        p_top_k: int = P_TOP_K,
        push_before_test: bool = False,
    ) -> None:
        self.n_max, self.p_min, self.n_min, self.p_top_k = n_max, p_min, n_min, p_top_k
        self._push_before_test = push_before_test

    def begin(self, limit: int, source: str) -> PMinWalk:
        return PMinWalk(min(limit, self.n_max), self.p_min, self.n_min, self._push_before_test)

    def learn(self, round_: Round) -> None:
        pass
