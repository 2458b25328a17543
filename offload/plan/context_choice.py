"""Chooses the context of a model whose user asked for none. Pure.

A longer context takes memory that experts would use, so it costs decode speed. It may also take the
room of the ring, without which the CPU computes prompts: decodes are then even faster. So both
speeds limit the context. llama.cpp takes the model's own context, and less only if that does not
fit memory (`llama_params_fit`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.plan.ends import Speeds

LEAST_CTX = 4096  # tokens that are taken whatever they cost
MOST_LOSS = 0.1  # most share of the decode speed that a longer context may cost
MOST_PROMPT_LOSS = 0.5  # the same of the speed of prompts
_STEP = 256  # libllama rounds contexts to this many tokens


@dataclass(frozen=True)
class ContextChoice:
    """The tokens of context, and a sentence that says why."""

    n_ctx: int
    why: str


def choose_context(n_ctx_train: int, speeds: Callable[[int], Speeds | None]) -> ContextChoice:
    """Return the largest context that costs at most `MOST_LOSS` of the decode speed.

    It costs at most `MOST_PROMPT_LOSS` of the speed of prompts. It is the model's own, or a power
    of two below that. `speeds(n_ctx)` returns the expected speeds with this context, or None if it
    does not fit memory.
    """
    sizes = _sizes(n_ctx_train)
    base = speeds(sizes[-1]) if len(sizes) > 1 else None
    for n_ctx in sizes[:-1] if base is not None else ():
        found = speeds(n_ctx)
        if found is not None and base is not None and _is_near(found, base):
            return ContextChoice(n_ctx, _words(n_ctx, n_ctx_train))
    return ContextChoice(sizes[-1], _words(sizes[-1], n_ctx_train))


def _is_near(found: Speeds, base: Speeds) -> bool:
    answers = found.decode_tps >= (1.0 - MOST_LOSS) * base.decode_tps
    return answers and found.prefill_tps >= (1.0 - MOST_PROMPT_LOSS) * base.prefill_tps


def _sizes(n_ctx_train: int) -> list[int]:
    """The contexts to choose from, the largest first. The last one is always taken."""
    own = max(_STEP, n_ctx_train // _STEP * _STEP)
    sizes = [own]
    n_ctx = LEAST_CTX
    powers = []
    while n_ctx < own:
        powers.append(n_ctx)
        n_ctx *= 2
    return sizes + powers[::-1]


def _words(n_ctx: int, n_ctx_train: int) -> str:
    own = f"{n_ctx_train:,} that the model was trained for"
    if n_ctx + _STEP > n_ctx_train:
        return f"context: {n_ctx:,} tokens, all that the model was trained for (--ctx-size)"
    if n_ctx == LEAST_CTX:
        return (
            f"context: {n_ctx:,} tokens of the {own}; twice as many do not fit memory, or cost "
            f"over {MOST_LOSS:.0%} of the decode speed or {MOST_PROMPT_LOSS:.0%} of that of "
            "prompts (--ctx-size)"
        )
    return (
        f"context: {n_ctx:,} tokens of the {own}, the most that fit memory and cost at most "
        f"{MOST_LOSS:.0%} of the decode speed and {MOST_PROMPT_LOSS:.0%} of that of prompts "
        "(--ctx-size)"
    )
