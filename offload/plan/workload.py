"""The work that plans are made for: a prompt's tokens, and the tokens that are generated. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedWork:
    """The workload that a plan is made for: a prompt, then tokens in batches."""

    n_prompt: int = 4096  # tokens of the prompt; 0: decoding alone
    n_generated: float = 1024
    n_batch: int = 1  # tokens of one decode after the prompt

    @property
    def n_decodes(self) -> float:
        return self.n_generated / self.n_batch


@dataclass(frozen=True)
class TokenMix:
    """The proportion of prompt tokens that are evaluated to generated ones."""

    n_prompt: float
    n_generated: float

    def workload(self, n_prompt: int) -> PlannedWork:
        """Return a workload with a prompt of `n_prompt` tokens, in this proportion.

        If the mix has no prompt tokens, returns a workload of decoding alone.
        """
        if not self.n_prompt:
            return PlannedWork(0, 1)
        return PlannedWork(n_prompt, n_prompt * self.n_generated / self.n_prompt)

    @property
    def rounded(self) -> TokenMix:
        """The mix rounded to a power of two, so that plans do not change from start to start.

        Both numbers must be above 0.
        """
        return TokenMix(2.0 ** round(math.log2(self.n_prompt / self.n_generated)), 1)

    @property
    def words(self) -> str:
        if not self.n_prompt:
            return "planned for decoding alone"
        if not self.n_generated:
            return "planned for prompts alone"
        share = self.n_prompt / self.n_generated
        if share < 1:
            return f"planned for {1 / share:.3g} generated tokens to each prompt token"
        return f"planned for {share:.3g} prompt tokens to each generated one"


DECODING = TokenMix(0, 1)
# The mix of a plan if nothing is known of the user's. It follows from a comparison of mixes: with
# it, plans keep the speed of answers, and lose few prompts' (docs/log.md).
USUAL = TokenMix(4, 1)
