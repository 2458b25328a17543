"""The work and the time of a prompt, which is computed in ubatches. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from offload.model import ModelFacts
from offload.times.context_memory import ContextOptions
from offload.times.decodes import best_s
from offload.times.hits import Sharing
from offload.times.machine import Machine, Real
from offload.times.work import ModelWork, with_context

# Attention runs this many times faster in prompts than in decodes, because tensor cores compute it.
PROMPT_ATTENTION = 2.0


def prompt_context(context: ContextOptions, n_prompt: float, n_before: int = 0) -> ContextOptions:
    """Return `context` with the mean number of tokens that a prompt's tokens attend to.

    These are the `n_before` tokens that precede the prompt, and half of the prompt.
    """
    return replace(context.of_one, n_ctx=max(1, int(n_before + n_prompt / 2)))


def with_prompt(
    work: ModelWork, facts: ModelFacts, context: ContextOptions, n_prompt: float, n_before: int = 0
) -> ModelWork:
    """Return the work of a prompt's batches.

    `n_before` tokens of the context precede the prompt. The caches have the types of `context`.
    """
    work = with_context(work, facts, prompt_context(context, n_prompt, n_before))
    n_weights = work.context.n_weights / PROMPT_ATTENTION
    k, v = (facts.number(f"attention.{x}_length_mla") for x in ("key", "value"))
    if k:  # prompts attend to keys and values, decodes to the latent vectors
        latent = sum(facts.number(f"attention.{x}_length") for x in ("key", "value"))
        n_weights *= (k + v) / latent
    return replace(work, context=replace(work.context, n_weights=n_weights))


def prefill_s(
    machine: Machine,
    work: ModelWork,
    sharing: Sharing,
    n_prompt: int,
    n_ubatch: Real,
    *,
    hybrid: bool = False,
) -> Real:
    """Return the seconds of a prompt of `n_prompt` tokens, in ubatches of `n_ubatch`.

    With `hybrid`, CPU and device may share the layers of an ubatch.
    """

    def ubatch_s(n_tokens: Real) -> Real:
        return best_s(machine, work, sharing, np.maximum(n_tokens, 1), hybrid=hybrid)

    return in_ubatches_s(ubatch_s, n_prompt, n_ubatch)


def in_ubatches_s(ubatch_s: Callable[[Real], Real], n_prompt: int, n_ubatch: Real) -> Real:
    """Return the seconds of a prompt in ubatches. An ubatch of n tokens takes `ubatch_s(n)`."""
    whole, rest = np.divmod(n_prompt, n_ubatch)
    total = whole * ubatch_s(n_ubatch) if np.any(whole) else 0.0
    if np.any(rest):
        total = total + np.where(rest > 0, ubatch_s(rest), 0.0)
    return total
