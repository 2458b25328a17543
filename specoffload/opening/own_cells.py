"""Prices cells of its own for each conversation (--no-kv-unified).

With one shared cache, the attention of each conversation passes over the cells of all that are at
work, and masks those of others. With cells of its own it passes over these alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.times.decodes import attention_s, best_s
from offload.times.prompts import prefill_s, with_prompt
from offload.times.work import with_context
from specoffload.opening.planning import Planned, PlannedDevice

N_PROMPT = 2048  # tokens of a prompt that is read beside other conversations
_HELPS = 0.9  # largest ratio of times that is worth naming


@dataclass(frozen=True)
class OwnCellsPrice:
    """Seconds of conversations that are at work together, with shared cells and with own ones.

    Each holds `depth` tokens. A decode writes a token of each. `prompt_s` is the time of `n_prompt`
    tokens of one conversation's prompt.
    """

    n_conversations: int
    depth: int
    decode_s: float
    own_decode_s: float
    n_prompt: int
    prompt_s: float
    own_prompt_s: float
    n_ubatches: int  # of the prompt

    @property
    def own_beside_s(self) -> float:
        """Seconds of the prompt with own cells, and of the answers that are written meanwhile.

        A batch is cut into ubatches with equally many tokens of each conversation. So answers that
        ride along with a shared cache take a decode of their own for each ubatch of the prompt.
        """
        return self.own_prompt_s + self.n_ubatches * self.own_decode_s

    @property
    def helps(self) -> bool:
        """True if prompts or answers would be at least a tenth shorter."""
        pairs = (self.own_beside_s, self.prompt_s), (self.own_decode_s, self.decode_s)
        return any(own_s <= _HELPS * shared_s for own_s, shared_s in pairs)


def own_cells_price(planned: Planned, n_conversations: int, depth: int) -> OwnCellsPrice:
    """Price conversations of `depth` tokens each, on a plan for a shared cache.

    The experts of a decode are those of neighbouring tokens of one text. Tokens of different texts
    use more of them, so the gain is an upper bound.
    """
    n_prompt = min(N_PROMPT, depth)
    each = [_seconds(part, n_conversations, depth, n_prompt) for part in planned.parts]
    decode_s, own_decode_s, prompt_s, own_prompt_s = (
        sum(column) for column in zip(*each, strict=True)
    )
    n_ubatches = max(-(-n_prompt // part.plan.n_ubatch) for part in planned.parts)
    return OwnCellsPrice(
        n_conversations, depth, decode_s, own_decode_s, n_prompt, prompt_s, own_prompt_s, n_ubatches
    )


def _seconds(
    part: PlannedDevice, n_conversations: int, depth: int, n_prompt: int
) -> tuple[float, float, float, float]:
    """Return one device's seconds: a decode with shared and own cells, and a prompt with both."""
    context, hybrid = part.context, part.request.plan_for_splits
    deep = replace(context, n_ctx=n_conversations * depth, n_sequences=1, kv_unified=True)
    work = with_context(part.work, part.facts, deep)
    decode_s = float(best_s(part.machine, work, part.plan.sharing, n_conversations, hybrid=hybrid))
    # All cells are read once in either way. A token computes with those of one conversation.
    spared_s = attention_s(part.machine, work, n_conversations) - attention_s(part.machine, work, 1)
    shared_s, own_s = (
        _prompt_s(part, n * depth, n_prompt) for n in (n_conversations, 1)
    )  # fmt: skip
    return decode_s, decode_s - float(spared_s), shared_s, own_s


def _prompt_s(part: PlannedDevice, n_cells: int, n_prompt: int) -> float:
    """Return the seconds of a prompt's tokens that attend to `n_cells` cells."""
    context = replace(part.context, n_sequences=1, kv_unified=True)
    work = with_prompt(part.work, part.facts, context, 0, n_cells)
    sharing, n_ubatch = part.plan.sharing, min(part.plan.n_ubatch, n_prompt)
    hybrid = part.request.plan_for_splits
    return float(prefill_s(part.machine, work, sharing, n_prompt, n_ubatch, hybrid=hybrid))
