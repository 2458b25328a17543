"""Chooses the context of a model whose user asked for none. Pure.

A longer context takes memory that experts would use, so answers are slower. It may also take the
room of the ring, without which the CPU computes prompts. So the time of a request with a prompt and
an answer limits the context. The plan is made for this time too, and so it changes smoothly with
the context, while either speed alone may jump. llama.cpp takes the model's own context, and less
only if that does not fit memory (`llama_params_fit`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LEAST_CTX = 4096  # tokens that are taken whatever they cost
MOST_LOSS = 0.1  # most share of a request's speed that a longer context may cost
_STEP = 256  # libllama rounds contexts to this many tokens


@dataclass(frozen=True)
class ContextChoice:
    """The tokens of context, and a sentence that says why."""

    n_ctx: int
    why: str


def choose_context(n_ctx_train: int, request_s: Callable[[int], float | None]) -> ContextChoice:
    """Return the largest context that costs at most `MOST_LOSS` of a request's speed.

    It is the model's own, or a power of two below that. `request_s(n_ctx)` returns the expected
    seconds of a usual request with this context, or None if the context does not fit memory.
    """
    sizes = _sizes(n_ctx_train)
    base_s = request_s(sizes[-1]) if len(sizes) > 1 else None
    for n_ctx in sizes[:-1] if base_s is not None else ():
        found_s = request_s(n_ctx)
        if found_s is not None and base_s is not None and (1.0 - MOST_LOSS) * found_s <= base_s:
            return ContextChoice(n_ctx, _words(n_ctx, n_ctx_train))
    return ContextChoice(sizes[-1], _words(sizes[-1], n_ctx_train))


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
            f"over {MOST_LOSS:.0%} of the speed of requests (--ctx-size)"
        )
    return (
        f"context: {n_ctx:,} tokens of the {own}, the most that fit memory and cost at most "
        f"{MOST_LOSS:.0%} of the speed of requests (--ctx-size)"
    )
