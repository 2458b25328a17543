"""Checks which block drafts (DFlash, DFlash2, DSpark) suit a target, and counts their memory. Pure.

A block draft reads the inputs of several layers of its target. It computes a block of tokens in one
pass: the text's last token, and a mask token for each token to draft. DFlash drafts each place by
itself. DFlash2 adds a lattice of scores between the candidates of neighbouring places. DSpark adds
a Markov head, and may have a head for the confidence in each token (llama.cpp #22105, #27342).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.model import ModelFacts
from offload.plan.row_draft import (
    TOKENS,
    layers_of,
    map_damage,
    other_target_reason,
    uneven_reason,
)
from offload.plan.weights import device_bytes
from offload.times.context_memory import ContextOptions, context_memory

BLOCK_ARCHITECTURE = "dflash"
_MARKOV, _SELECTOR, _CONFIDENCE = "markov_w1.weight", "selector_hidden.weight", "conf_proj.weight"
_BLOCK_SIZE = 16  # tokens of a block, if the file does not say it
_LONGEST_BLOCK = 64  # more rows than this are never verified
_UBATCH, _LARGEST_UBATCH = 64, 256  # tokens computed at once, unless a block has more
_F32 = 4
_TENSORS = 3  # tensors as large as a batch's logits that a Markov head holds at once


@dataclass(frozen=True)
class BlockShape:
    """The size of a file's blocks, and the heads that it has.

    A block of n drafted tokens has `first_place` + n tokens, and begins with the text's last token.
    The first drafted token is read at `first_place`.
    """

    kind: str  # the drafter's name: dflash or dspark
    n_most: int  # most drafted tokens of a block
    first_place: int
    mask_token: int
    is_causal: bool  # tokens of a block do not see those after them
    n_candidates: int  # candidates of each place in DFlash2's lattice; 0: there is none
    has_confidence: bool  # a head predicts whether each drafted token is accepted


def block_shape(facts: ModelFacts) -> BlockShape:
    """Return the shape of a file's blocks. The file must be of the architecture `dflash`."""
    is_dspark, has_lattice = _MARKOV in facts.weights, _SELECTOR in facts.weights
    first = 0 if is_dspark and _flag(facts, "sample_from_anchor", default=True) else 1
    n_tokens = min(_LONGEST_BLOCK, facts.number("block_size", _BLOCK_SIZE))
    mask = facts.header.metadata.get("tokenizer.ggml.mask_token_id", -1)
    return BlockShape(
        kind="dspark" if is_dspark else "dflash",
        n_most=n_tokens - first,
        first_place=first,
        mask_token=mask if isinstance(mask, int) else -1,
        is_causal=_flag(facts, "attention.causal", default=False),
        n_candidates=facts.number("selector_top_k") if has_lattice else 0,
        has_confidence=is_dspark and _CONFIDENCE in facts.weights,
    )


def _flag(facts: ModelFacts, key: str, *, default: bool) -> bool:
    return bool(facts.header.metadata.get(f"{facts.architecture}.{key}", default))


def no_block_reason(target: ModelFacts, facts: ModelFacts) -> str:
    """Return why the file cannot draft for the target, as a sentence; "" if it can."""
    reason = _reason(target, facts)
    return f"{facts.path.name} {reason}" if reason else ""


def _reason(target: ModelFacts, facts: ModelFacts) -> str:
    if facts.architecture != BLOCK_ARCHITECTURE:
        return f"is no block draft, but a model of {facts.architecture}"
    reason = other_target_reason(target, facts, facts.number("embedding_length"))
    return reason or _damage(facts, facts.header.lengths.get(TOKENS, 0))


def _damage(facts: ModelFacts, n_tokens: int) -> str:
    """Return what is wrong with the file, on which the library would abort or draft nonsense."""
    shape = block_shape(facts)
    if not 0 <= shape.mask_token < n_tokens:
        return "names no mask token (tokenizer.ggml.mask_token_id), with which blocks are filled"
    if shape.n_most < 1:
        return f"has blocks of {facts.number('block_size')} tokens, which draft none"
    if facts.number("block_count") < 1:
        return "has no layers"
    if shape.kind == "dspark":
        if f"{BLOCK_ARCHITECTURE}.block_size" not in facts.header.metadata:
            return "does not say how many tokens a block has (dflash.block_size)"
        if _SELECTOR in facts.weights:
            return "has the heads of DFlash2 and of DSpark, of which the library computes one"
    if reason := uneven_reason(facts):
        return reason
    if facts.number("hyper_connection.count"):
        for key in ("attention.sliding_window", "attention.output_group_count"):
            if not facts.number(key):
                return f"lacks {BLOCK_ARCHITECTURE}.{key}, which drafts for DeepSeek-V4 need"
        if "d2t" in facts.weights:
            return "has a map of tokens (d2t), which the library ignores in drafts for DeepSeek-V4"
    return map_damage(facts)


def block_ubatch(shape: BlockShape, target: ContextOptions) -> int:
    """Return the most tokens at once. A decode computes whole blocks, and all their logits."""
    n_block = shape.first_place + shape.n_most
    wanted = max(_UBATCH, n_block * target.n_sequences)
    return max(n_block, min(target.n_ubatch, wanted, _LARGEST_UBATCH))


def block_bytes(facts: ModelFacts, context: ContextOptions) -> int:
    """Return the device memory of the file's weights, and of its context beside the target's."""
    shape = block_shape(facts)
    n_ubatch = block_ubatch(shape, context)
    spec = replace(context, n_outputs=1, n_ubatch=n_ubatch, n_rs_seq=0, kv_offload=True)
    n_tokens = facts.header.lengths.get(TOKENS, 0)
    n_tensors = _TENSORS if shape.kind == "dspark" else 1 + ("d2t" in facts.weights)
    width = n_tensors * n_tokens + len(layers_of(facts)) * facts.number("embedding_length")
    return device_bytes(facts) + context_memory(facts, spec).total_bytes + n_ubatch * width * _F32
