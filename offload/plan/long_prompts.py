"""Chooses a larger ubatch for prompts that are longer than the planned one. Pure.

Plans are made for a prompt of at most 8,192 tokens, which a larger ubatch cannot make faster. If
the context holds longer prompts, a larger ubatch copies streamed experts less often. But its
buffers take the memory of slots. So it is chosen if long prompts gain by it, and the planned prompt
and answers lose nearly nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.plan.objective import Seconds
from offload.times.hits import Sharing
from offload.times.machine import Machine, Real
from offload.times.prompts import prefill_s
from offload.times.work import ModelWork

# ggml-cuda sorts a product's tokens by expert in the shared memory of a block, with 4 bytes for
# each token of the batch, and aborts if they do not fit (`launch_mm_ids_helper` in
# ggml/src/ggml-cuda/mmid.cu). A block has 64 KiB on an RTX 20, and 99 KiB on an RTX 30, 40 or 50
# (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications).
# So 16,384 tokens fit all of these cards, and 32,768 fit none. A start asks the device, because
# older cards have 48 KiB.
LONG_UBATCHES = (16384,)
LONGEST_PROMPT = 32768  # most tokens of the prompt by which these ubatches are compared
LEAST_GAIN = 0.05  # least share of a long prompt's time that a larger ubatch saves
MOST_COST = 0.02  # most share by which the planned workload, a prompt and its answer, gets longer
MOST_PROMPT_COST = 0.05  # the same of the planned prompt alone


@dataclass(frozen=True)
class LongPrompt:
    """A prompt that fills more than the largest usual ubatch."""

    n_tokens: int
    n_planned: int  # tokens of the planned prompt
    work: ModelWork  # with the attention of the long prompt
    splits: bool = False  # CPU and device may share its layers

    def seconds(self, machine: Machine, sharing: Sharing, n_ubatch: Real) -> Real:
        return prefill_s(machine, self.work, sharing, self.n_tokens, n_ubatch, hybrid=self.splits)


@dataclass(frozen=True)
class LongerUbatch:
    """The way with a larger ubatch, and why it is chosen."""

    index: int
    reason: str


def longer_ubatch(
    prompt: LongPrompt, long_s: Any, seconds: Seconds, n_ubatch: Any, may_use: Any, chosen: int
) -> LongerUbatch | None:
    """Return the way that reads the long prompt fastest, or None if `chosen` is about as good.

    All arrays have one dimension, the ways. `long_s`: the long prompt. `seconds`: the planned
    workload. `may_use`: ways that fit and have a larger ubatch.
    """
    allowed = may_use.copy()
    for its_s, most_cost in (
        (seconds.prompt_s, MOST_PROMPT_COST),
        (seconds.mean_s, MOST_COST),
        (seconds.even_s, MOST_COST),
    ):
        allowed &= its_s <= (1.0 + most_cost) * its_s[chosen]
    if not allowed.any():
        return None
    best = int(np.argmin(np.where(allowed, long_s, np.inf)))
    if long_s[best] > (1.0 - LEAST_GAIN) * long_s[chosen]:
        return None
    gain, cost = long_s[chosen] / long_s[best], seconds.prompt_s[best] / seconds.prompt_s[chosen]
    return LongerUbatch(
        best,
        f"Prompts are computed {n_ubatch[best]:,} tokens at once, because one of "
        f"{prompt.n_tokens:,} tokens is then read {gain:.2f} times as fast as with "
        f"{n_ubatch[chosen]:,}; one of {prompt.n_planned:,} tokens takes {cost:.2f} times as long",
    )
