"""Chooses the context of a model whose user asked for none. Pure.

A longer context takes memory that experts would use, so answers are slower. It may also take memory
of the buffers of large ubatches, so prompts are slower. So the time of a request with a prompt and
an answer limits the context. This time assumes that the model uses all experts equally often. Plans
lose little of it for guessed hits, so it changes smoothly with the context. A time with guessed
hits would jump from plan to plan.

The cost of a longer context is compared with the time that the request takes if all experts stay in
RAM. This time does not depend on the card. A share of the card's own time would allow less context
on a larger card, because the same experts take a larger share of a shorter time there.
So a context may cost more than that share of this card's own speed, or more of prompts alone. The
sentence of the choice then says what it costs, and which smaller context gives that back. llama.cpp
takes the model's own context, and less only if that does not fit memory (`llama_params_fit`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_CTX = 4096  # tokens that are taken whatever they cost
# Tokens that the first prompt of an agent needs: one of Claude Code's had 29,261 (docs/plans.md).
AGENT_CTX = 32768
# Most that a context of `AGENT_CTX` may cost where agents may ask. Their first prompts are refused
# with less context, so a request may take 1.4 times as long.
MOST_LOSS_FOR_AGENTS = 0.3
MOST_LOSS = 0.1  # most that a longer context may cost: share of a request's speed, experts in RAM
_STEP = 256  # libllama rounds contexts to this many tokens
# What the longest context is, in the sentence of a choice.
TRAINED, STRETCHED = "that the model was trained for", "that the rope flags stretch it to"


@dataclass(frozen=True)
class ContextChoice:
    """The tokens of context, and a sentence that says why, and what they cost if that is much."""

    n_ctx: int
    reason: str


@dataclass(frozen=True)
class RequestSeconds:
    """Expected seconds of a usual request with one context."""

    planned_s: float  # with the plan for this context
    in_ram_s: float = 0.0  # with all experts in RAM; 0 if no card is used
    # Parts of a request whose prompt is long enough for the largest ubatch; 0: it has no such part.
    prompt_s: float = 0.0
    answer_s: float = 0.0


def choose_context(
    n_ctx_train: int,
    request_s: Callable[[int], RequestSeconds | None],
    *,
    for_agents: bool = False,
    own: str = TRAINED,
) -> ContextChoice:
    """Return the largest context that costs little of a request's speed.

    It is the model's own, or a power of two below that. `own` is TRAINED, or STRETCHED if rope
    flags made `n_ctx_train` longer than what the model was trained for. `request_s(n_ctx)` returns
    the expected seconds of a usual request with this context, or None if the context does not fit
    memory. A context may cost at most `MOST_LOSS` of the speed that the request has with
    `LEAST_CTX` tokens of context and all experts in RAM, or of the plan's speed if that is lower.
    With `for_agents`, `AGENT_CTX` tokens may cost up to `MOST_LOSS_FOR_AGENTS`. If the chosen
    context costs more than `MOST_LOSS` of this card's speed of prompts or of answers, the sentence
    says so.
    """
    sizes = _sizes(n_ctx_train)
    base = request_s(sizes[-1]) if len(sizes) > 1 else None
    for n_ctx in sizes[:-1] if base is not None else ():
        request = request_s(n_ctx)
        if request is None or base is None:
            continue
        cost_s = request.planned_s - base.planned_s
        loss = cost_s / (cost_s + max(base.planned_s, base.in_ram_s))
        if loss <= MOST_LOSS:
            reason = _words(n_ctx, n_ctx_train, own)
            return ContextChoice(n_ctx, reason + _cost_words(n_ctx, sizes, request_s))
        if for_agents and n_ctx == AGENT_CTX and loss <= MOST_LOSS_FOR_AGENTS:
            reason = _agent_words(n_ctx_train, own, loss)
            return ContextChoice(n_ctx, reason + _cost_words(n_ctx, sizes, request_s))
    return ContextChoice(sizes[-1], _words(sizes[-1], n_ctx_train, own))


def _cost_words(
    n_ctx: int, sizes: Sequence[int], request_s: Callable[[int], RequestSeconds | None]
) -> str:
    """Words on what a context costs on this card, and on the smaller one that gives it back.

    It is compared with the context up to it whose requests are fastest. A plan trades prompts for
    answers, so the fastest prompts and the fastest answers of several plans cannot be had together.
    Returns "" if it costs at most `MOST_LOSS` of the speed of prompts and of answers.
    """
    asked = {n: request_s(n) for n in sizes if n <= n_ctx}
    fitting = {n: request for n, request in asked.items() if request is not None}
    fastest = min(fitting.values(), key=lambda request: request.prompt_s + request.answer_s)
    lost = {n: _lost(request, fastest) for n, request in fitting.items()}
    if max(lost[n_ctx]) <= MOST_LOSS:
        return ""
    cheaper_ctx = max(n for n, shares in lost.items() if max(shares) <= MOST_LOSS)
    named = zip(("prompts", "answers"), lost[n_ctx], strict=True)
    costs = [f"{share:.0%} of the speed of {name}" for name, share in named if share > MOST_LOSS]
    return (
        f"; on this machine it costs {' and '.join(costs)}, "
        f"which --ctx-size {cheaper_ctx} gives back"
    )


def _lost(request: RequestSeconds, fastest: RequestSeconds) -> tuple[float, float]:
    """Return the shares of the speed of prompts and of answers that a context loses."""
    pairs = (request.prompt_s, fastest.prompt_s), (request.answer_s, fastest.answer_s)
    prompt, answer = (max(0.0, 1.0 - other_s / own_s) if own_s else 0.0 for own_s, other_s in pairs)
    return prompt, answer


def _agent_words(n_ctx_train: int, own: str, loss: float) -> str:
    return (
        f"context: {AGENT_CTX:,} tokens of the {n_ctx_train:,} {own}, "
        f"because the first prompt of an agent may have 29,000; this costs {loss:.0%} of the speed "
        "with experts in RAM (--ctx-size)"
    )


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


def _words(n_ctx: int, n_ctx_train: int, own: str) -> str:
    if n_ctx + _STEP > n_ctx_train:
        return f"context: {n_ctx:,} tokens, all {own} (--ctx-size)"
    share = f"context: {n_ctx:,} tokens of the {n_ctx_train:,} {own}"
    if n_ctx == LEAST_CTX:
        return (
            f"{share}; twice as many do not fit memory, or cost "
            f"over {MOST_LOSS:.0%} of the speed with experts in RAM (--ctx-size)"
        )
    return (
        f"{share}, the most that fit memory and cost at most "
        f"{MOST_LOSS:.0%} of the speed with experts in RAM (--ctx-size)"
    )
