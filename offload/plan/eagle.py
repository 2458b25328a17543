"""Checks if an EAGLE-3 file can draft for a target, and counts its device memory. Pure."""

from __future__ import annotations

from dataclasses import replace

from offload.model import ModelFacts
from offload.plan.context import ContextOptions, context_memory
from offload.plan.sharing import device_bytes

ARCHITECTURE = "eagle3"
_UBATCH = 64  # most tokens at once, since the graph computes the logits of every token
_F32 = 4
_TOKENS = "tokenizer.ggml.tokens"
# Architectures whose graphs in the supported version of llama.cpp name the inputs of their layers.
# The library aborts if others are asked for.
_TARGETS = frozenset(
    ("llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "gpt-oss", "minimax-01")
    + ("minimax-m2", "bailingmoe3", "deepseek4", "gemma4", "hunyuan_vl", "hunyuan-dense", "lfm2")
    + ("lfm2moe", "mimo2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe")
)
# Those of them that also give rows behind the last layer.
_BEHIND = frozenset(
    ("qwen3next", "qwen35", "qwen35moe", "gpt-oss", "bailingmoe3", "gemma4", "mimo2")
    + ("nemotron_h", "nemotron_h_moe")
)
_OTHER = "was made for another target"
_NEEDED = ("fc.weight", "output_norm.weight") + tuple(
    f"blk.0.{kind}.weight"
    for kind in ("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output")
    + ("ffn_norm", "ffn_gate", "ffn_down", "ffn_up")
)


def target_layers(target: ModelFacts, facts: ModelFacts) -> tuple[int, ...]:
    """Return the layers of the target whose inputs the EAGLE-3 file reads.

    -1 stands for the rows behind the last layer.
    """
    return tuple(-1 if layer == target.n_layers else layer for layer in _layers(facts))


def _layers(facts: ModelFacts) -> tuple[int, ...]:
    value = facts.header.metadata.get(f"{ARCHITECTURE}.target_layers", ())
    return tuple(int(v) for v in value) if isinstance(value, tuple) else ()


def eagle_complaint(target: ModelFacts, facts: ModelFacts) -> str:
    """Return why the file cannot draft for the target, as a sentence; "" if it can."""
    why = _complaint(target, facts)
    return f"{facts.path.name} {why}" if why else ""


def _complaint(target: ModelFacts, facts: ModelFacts) -> str:
    if facts.architecture != ARCHITECTURE:
        return f"is no EAGLE-3 file, but a model of {facts.architecture}"
    if target.architecture not in _TARGETS:
        kind = target.architecture
        return f"needs rows of the target's layers, and the library gives none of {kind}"
    width, wanted = target.number("embedding_length"), facts.number("target_hidden_size")
    if wanted != width:
        return f"{_OTHER}: it reads rows of {wanted} values, and the target's have {width}"
    layers = _layers(facts)
    most = target.n_layers - (target.architecture not in _BEHIND)
    if len(layers) != 3 or not all(0 <= layer <= most for layer in layers):
        named = ", ".join(map(str, layers)) or "none"
        return f"{_OTHER}: it reads layers {named}, and must read 3 from 0 to {most}"
    n_own, n_here = (f.header.lengths.get(_TOKENS, 0) for f in (facts, target))
    if n_own != n_here:
        return f"{_OTHER}: it has {n_own} tokens, and the target {n_here}"
    return _damage(target, facts)


def _damage(target: ModelFacts, facts: ModelFacts) -> str:
    """Return what is wrong with the weights, on which the library would abort."""
    if facts.number("block_count") != 1:
        return f"has {facts.number('block_count')} layers, and an EAGLE-3 file has one"
    if lacking := [name for name in _NEEDED if name not in facts.weights]:
        return f"lacks {lacking[0]}"
    usual = facts.number("embedding_length") // max(1, facts.number("attention.head_count"))
    sizes = [facts.number(f"attention.{kind}_length", usual) for kind in ("key", "value")]
    if sizes[0] != sizes[1]:
        return f"has keys of {sizes[0]} values and values of {sizes[1]}, which must be equal"
    n_tokens = facts.header.lengths.get(_TOKENS, 0)
    own = facts.weights.get("token_embd.weight")
    if own is not None and own.entry.shape[-1] < n_tokens:
        return f"has {n_tokens} tokens, and embeddings of {own.entry.shape[-1]}"
    d2t = facts.weights.get("d2t")
    if d2t is not None and (d2t.entry.type != "i64" or len(d2t.entry.shape) != 1):
        return f"has a map of tokens (d2t) of type {d2t.entry.type}, which must be a row of i64"
    shared = [n for n in ("token_embd.weight", "output.weight") if n not in facts.weights]
    if shared and facts.number("embedding_length") != target.number("embedding_length"):
        return f"lacks {shared[0]}, and the target's has rows of another length"
    if d2t is not None and "output.weight" in shared:
        return "lacks output.weight, and the target's has other tokens than its map (d2t)"
    return ""


def eagle_ubatch(target: ContextOptions) -> int:
    """Return the most tokens at once. The library needs room for the logits of every sequence."""
    return max(min(target.n_ubatch, _UBATCH), target.n_sequences)


def eagle_bytes(facts: ModelFacts, context: ContextOptions) -> int:
    """Return the device memory of the file's weights, and of its context beside the target's."""
    spec = replace(context, n_outputs=1, n_ubatch=eagle_ubatch(context), n_rs_seq=0)
    n_tokens = facts.header.lengths.get(_TOKENS, 0)
    rows = facts.weights["output.weight"].entry.shape[-1] if "d2t" in facts.weights else 0
    width = n_tokens + rows + 3 * facts.number("target_hidden_size")
    buffers = spec.n_ubatch * width * _F32
    return device_bytes(facts) + context_memory(facts, spec).total_bytes + buffers
