"""Checks what could draft from a target's hidden rows, and counts its memory. Pure.

These are the target's own layers for multi-token prediction (MTP), or an EAGLE-3 file beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offload.model import ModelFacts, TensorEntry, is_experts, layer_of
from offload.plan.weights import device_bytes
from offload.times.context_memory import ContextOptions, context_memory, mtp_context_bytes
from offload.times.machine import Machine
from offload.times.work import ModelWork, WeightWork

# Architectures whose MTP layers the supported version of llama.cpp can compute: first those with
# graphs of one layer, then those with graphs of several. The library aborts if a file has more
# layers than its graph computes.
_ONE_LAYER = frozenset(
    ("deepseek2", "deepseek32", "deepseek4", "glm4moe", "glm-dsa", "qwen3next", "qwen35")
    + ("qwen35moe", "nemotron_h_moe", "bailingmoe3", "cohere2moe")
)
_SEVERAL_LAYERS = frozenset({"mimo2", "step35", "hy_v3"})
MTP_ARCHITECTURES = _ONE_LAYER | _SEVERAL_LAYERS
_NEEDED = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
# Weights that these graphs read without checking that the file has them.
_MORE_NEEDED = {
    "deepseek2": ("attn_q_a.weight", "attn_q_b.weight", "attn_k_b.weight", "attn_v_b.weight")
    + ("ffn_gate_inp.weight", "ffn_down_exps.weight", "ffn_up_shexp.weight"),
    "mimo2": ("attn_qkv.weight", "ffn_gate.weight", "ffn_down.weight", "ffn_up.weight"),
    **{name: ("ffn_gate_inp.weight",) for name in ("glm4moe", "qwen35moe", "qwen3next")},
}
_MOST_DRAFTED = 6  # tokens of the longest draft whose speed is estimated
_MOST_SHARE = 0.1  # most of the GPU memory for experts that the MTP layers' experts may take

ARCHITECTURE = "eagle3"
_UBATCH = 64  # most tokens at once, since the graph computes the logits of every token
_F32 = 4
TOKENS = "tokenizer.ggml.tokens"  # whose number is that of the vocabulary
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
# Architectures whose graph names the input that a layer after the last one would have.
_NAMES_LAST = frozenset({"deepseek4"})
_OTHER_TARGET = "was made for another target"
_EAGLE_NEEDED = ("fc.weight", "output_norm.weight") + tuple(
    f"blk.0.{kind}.weight"
    for kind in ("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output")
    + ("ffn_norm", "ffn_gate", "ffn_down", "ffn_up")
)


def no_mtp_reason(facts: ModelFacts) -> str:
    """Return why the file's MTP layers cannot draft, as the end of a sentence; "" if they can."""
    n, first = facts.n_mtp_layers, facts.n_layers
    if not n:
        return "the file has no layers for it"
    if facts.architecture not in MTP_ARCHITECTURES:
        return f"the library cannot compute such layers of {facts.architecture}"
    if first < 1:
        return f"all of the file's {n} layers are said to be for it"
    if n > 1 and facts.architecture in _ONE_LAYER:
        return (
            f"the file has {n} layers for it, and the library computes one of {facts.architecture}"
        )
    there = [i for i in range(first, first + n) if f"blk.{i}.{_NEEDED[0]}" in facts.weights]
    if not there:
        return "its layers were left out of the file"
    if len(there) < n:
        return f"the header counts {n} layers for it, and the file has {len(there)}"
    for layer in there:
        for kind in (*_NEEDED, *_MORE_NEEDED.get(facts.architecture, ())):
            if f"blk.{layer}.{kind}" not in facts.weights:
                return f"the file lacks blk.{layer}.{kind}"
    head, indexer = (facts.number(f"attention.{key}key_length") for key in ("", "indexer."))
    if facts.architecture == "deepseek4" and head == indexer:
        # It rotates an empty cache's keys, and ends the process by dividing by their size.
        return f"the library fails if keys and the indexer's keys both have {head} values"
    return ""


def loading_reason(facts: ModelFacts, refusal: str) -> str:
    """Return why the library's `refusal` to open the file is due to MTP layers; "" if it is not.

    The library reads these layers even if they are not to be loaded.
    """
    extra = next((name for name in facts.weights if ".nextn." in name), "")
    if not facts.n_mtp_layers:
        return extra and f"the file has {extra}, but its header counts no layers of that kind"
    lacking = re.search(r"tensor '(blk\.(\d+)\.[^']+)' not found", refusal)
    if lacking is None or int(lacking[2]) < facts.n_layers:
        return ""
    return (
        f"the file lacks {lacking[1]} of its layer for multi-token prediction, and the library "
        "opens a file only with the whole layer or without it: take another file of this model"
    )


@dataclass(frozen=True)
class MtpPlan:
    """The places of the MTP layers' weights, and the device memory of the weights and a context."""

    weight_bytes: int  # on the device
    context_bytes: int
    host: tuple[TensorEntry, ...]  # experts that the CPU computes, from host memory
    what: str  # the layers, in words
    reason: str

    @property
    def device_bytes(self) -> int:
        return self.weight_bytes + self.context_bytes

    @property
    def patterns(self) -> tuple[str, ...]:
        """Regular expressions that match the names of the weights in host memory, for libllama."""
        return tuple(rf"^{re.escape(entry.name)}$" for entry in self.host)


def plan_mtp(facts: ModelFacts, options: ContextOptions, budget_bytes: int | None) -> MtpPlan:
    """Return the plan for a device with `budget_bytes` for the whole model (None: no limit).

    The MTP layers' experts are resident unless they take more than a tenth of the memory that is
    left for experts. In that case the CPU computes them, because a draft step on the CPU is short
    compared with a decode, and the other layers make better use of the memory.
    """
    weights = [p.entry for p in facts.weights.values() if layer_of(p.entry.name) >= facts.n_layers]
    # llama.cpp's files may repeat the embedding, which the CPU looks up.
    on_device = [e for e in weights if not e.name.endswith("nextn.embed_tokens.weight")]
    experts = tuple(e for e in on_device if is_experts(e))
    total, of_experts = _bytes(on_device), _bytes(experts)
    context = mtp_context_bytes(facts, options)
    n = facts.n_mtp_layers
    what = f"layers for multi-token prediction ({n})"
    if budget_bytes is not None and experts:
        room = budget_bytes - (device_bytes(facts) - facts.expert_bytes)
        if of_experts > _MOST_SHARE * room:
            return MtpPlan(
                total - of_experts, context, experts, what,
                f"{what}: {of_experts / 2**20:.0f} MiB of experts stay in RAM, where the CPU "
                f"computes them, since they exceed a tenth of the {max(0, room) / 2**20:.0f} MiB "
                "that experts have on the GPU",
            )  # fmt: skip
    return MtpPlan(total, context, (), what, f"{what}: {total / 2**20:.0f} MiB, resident")


def _bytes(entries: Sequence[TensorEntry]) -> int:
    return sum(entry.size_bytes for entry in entries)


# -- expected speed --------------------------------------------------------------------------------


class MtpLayer:
    """The work of MTP layers on a machine. Their times are estimates."""

    def __init__(self, machine: Machine, facts: ModelFacts, plan: MtpPlan) -> None:
        weights = [place.entry for place in facts.weights.values()]
        own = [e for e in weights if layer_of(e.name) >= facts.n_layers]
        copies = "nextn.embed_tokens.weight", "nextn.shared_head_head.weight"
        self.dense = _part([e for e in own if not is_experts(e) and not e.name.endswith(copies)])
        experts, n = _part([e for e in own if is_experts(e)]), max(1, facts.n_experts)
        self.expert = WeightWork(experts.size_bytes / n, experts.n_weights / n)
        self._machine, self._is_in_ram = machine, bool(plan.host)

    def seconds(self, work: ModelWork, n_tokens: int) -> float:
        """Seconds of computing `n_tokens`, and logits after the last one."""
        machine = self._machine
        gpu = machine.vram_bytes_per_s, machine.gpu_flops
        own = replace(work, expert=self.expert)
        seconds = self.dense.seconds(*gpu, n_tokens) + work.head.seconds(*gpu, 1)
        if self._is_in_ram:
            seconds += own.used_cpu_seconds(machine, n_tokens)
        else:
            seconds += own.used(n_tokens).seconds(*gpu, n_tokens)
        seconds += work.kernels_per_layer * machine.per_kernel_s
        seconds += self._is_in_ram * machine.per_switch_s
        return float(seconds)


def _part(entries: Sequence[TensorEntry]) -> WeightWork:
    return WeightWork(
        sum(e.size_bytes for e in entries),
        sum(math.prod(e.shape) for e in entries if len(e.shape) > 1),
    )


def expected_tps(
    layer: MtpLayer, work: ModelWork, decode_s: Callable[[int], float], accepted: float
) -> float:
    """Tokens/s of decoding with drafts of the best length, if each token is right with `accepted`.

    `decode_s(n)` are the seconds of a decode of n tokens of the model.
    """
    rates, n_tokens = [], 1.0
    for n in range(_MOST_DRAFTED + 1):
        # The first step also computes the rows of the accepted tokens of the round before.
        steps_s = layer.seconds(work, math.ceil(n_tokens)) + (n - 1) * layer.seconds(work, 1)
        rates.append(n_tokens / (decode_s(1 + n) + (steps_s if n else 0.0)))
        n_tokens += accepted ** (n + 1)
    return max(rates)


# -- EAGLE-3 ---------------------------------------------------------------------------------------


def target_layers(target: ModelFacts, facts: ModelFacts) -> tuple[int, ...]:
    """Return the layers of the target whose inputs the EAGLE-3 file or block draft reads.

    -1 stands for the rows behind the last layer.
    """
    layers = layers_of(facts)
    if target.architecture in _NAMES_LAST:
        return layers
    return tuple(-1 if layer == target.n_layers else layer for layer in layers)


def layers_of(facts: ModelFacts) -> tuple[int, ...]:
    """Return the numbers of the target's layers that a file's header names."""
    value = facts.header.metadata.get(f"{facts.architecture}.target_layers", ())
    return tuple(int(v) for v in value) if isinstance(value, tuple) else ()


def _wrong_layers(target: ModelFacts, layers: Sequence[int], n_wanted: int = 0) -> str:
    """Return why the target has no such layers, as the end of a sentence; "" if it has them.

    `n_wanted` of them must be named; 0: at least one.
    """
    kind = target.architecture
    if kind not in _TARGETS:
        return f"needs rows of the target's layers, and the library gives none of {kind}"
    most = target.n_layers - (kind not in _BEHIND | _NAMES_LAST)
    has_number = len(layers) == n_wanted if n_wanted else len(layers) > 0
    if has_number and all(0 <= layer <= most for layer in layers):
        return ""
    named = ", ".join(map(str, layers)) or "none"
    must = f"{n_wanted} from" if n_wanted else "layers from"
    return f"{_OTHER_TARGET}: it reads layers {named}, and must read {must} 0 to {most}"


def no_eagle_reason(target: ModelFacts, facts: ModelFacts) -> str:
    """Return why the file cannot draft for the target, as a sentence; "" if it can."""
    reason = _reason(target, facts)
    return f"{facts.path.name} {reason}" if reason else ""


def _reason(target: ModelFacts, facts: ModelFacts) -> str:
    if facts.architecture != ARCHITECTURE:
        return f"is no EAGLE-3 file, but a model of {facts.architecture}"
    if target.architecture not in _TARGETS:
        return _wrong_layers(target, ())
    reason = other_target_reason(target, facts, facts.number("target_hidden_size"), 3)
    return reason or _damage(target, facts)


def other_target_reason(
    target: ModelFacts, facts: ModelFacts, width: int, n_layers: int = 0
) -> str:
    """Return why the file was made for another target, as the end of a sentence; "" if not.

    The file reads rows of `width` values, of `n_layers` layers; 0: of at least one.
    """
    n_values = target.number("embedding_length")
    if width != n_values:
        return f"{_OTHER_TARGET}: it reads rows of {width} values, and the target's have {n_values}"
    if reason := _wrong_layers(target, layers_of(facts), n_layers):
        return reason
    n_own, n_here = (f.header.lengths.get(TOKENS, 0) for f in (facts, target))
    if n_own != n_here:
        return f"{_OTHER_TARGET}: it has {n_own} tokens, and the target {n_here}"
    return ""


def uneven_reason(facts: ModelFacts) -> str:
    """Return why the library cannot cache the file's keys and values; "" if it can."""
    usual = facts.number("embedding_length") // max(1, facts.number("attention.head_count"))
    sizes = [facts.number(f"attention.{kind}_length", usual) for kind in ("key", "value")]
    if sizes[0] != sizes[1]:
        return f"has keys of {sizes[0]} values and values of {sizes[1]}, which must be equal"
    return ""


def _damage(target: ModelFacts, facts: ModelFacts) -> str:
    """Return what is wrong with the weights, on which the library would abort."""
    if facts.number("block_count") != 1:
        return f"has {facts.number('block_count')} layers, and an EAGLE-3 file has one"
    if lacking := [name for name in _EAGLE_NEEDED if name not in facts.weights]:
        return f"lacks {lacking[0]}"
    if reason := uneven_reason(facts):
        return reason
    n_tokens = facts.header.lengths.get(TOKENS, 0)
    own = facts.weights.get("token_embd.weight")
    if own is not None and own.entry.shape[-1] < n_tokens:
        return f"has {n_tokens} tokens, and embeddings of {own.entry.shape[-1]}"
    shared = [n for n in ("token_embd.weight", "output.weight") if n not in facts.weights]
    if shared and facts.number("embedding_length") != target.number("embedding_length"):
        return f"lacks {shared[0]}, and the target's has rows of another length"
    return map_damage(facts)


def map_damage(facts: ModelFacts) -> str:
    """Return what is wrong with the map from the file's tokens to the target's; "" if nothing."""
    d2t = facts.weights.get("d2t")
    if d2t is None:
        return ""
    if d2t.entry.type != "i64" or len(d2t.entry.shape) != 1:
        return f"has a map of tokens (d2t) of type {d2t.entry.type}, which must be a row of i64"
    if "output.weight" not in facts.weights:
        return "lacks output.weight, and the target's has other tokens than its map (d2t)"
    return ""


def eagle_ubatch(target: ContextOptions) -> int:
    """Return the most tokens at once. The library needs room for the logits of every sequence."""
    return max(min(target.n_ubatch, _UBATCH), target.n_sequences)


def eagle_bytes(facts: ModelFacts, context: ContextOptions) -> int:
    """Return the device memory of the file's weights, and of its context beside the target's."""
    spec = replace(context, n_outputs=1, n_ubatch=eagle_ubatch(context), n_rs_seq=0)
    spec = replace(spec, kv_offload=True)
    n_tokens = facts.header.lengths.get(TOKENS, 0)
    rows = facts.weights["output.weight"].entry.shape[-1] if "d2t" in facts.weights else 0
    width = n_tokens + rows + 3 * facts.number("target_hidden_size")
    buffers = spec.n_ubatch * width * _F32
    return device_bytes(facts) + context_memory(facts, spec).total_bytes + buffers
