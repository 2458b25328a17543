"""What a context takes of the device beside weights and slots: large estimates, pure."""

from __future__ import annotations

from offload.model import ModelFacts

_F16, _F32 = 2, 4
_ACTIVATIONS = 16  # rows of n_embd alive at once in one layer, generously


def kv_bytes(facts: ModelFacts, n_ctx: int) -> int:
    """The KV cache of `n_ctx` tokens in f16; for MLA the latent one (PEERS 1b)."""
    n_layers = facts.n_layers
    if facts.number("attention.kv_lora_rank"):
        width = facts.number("attention.kv_lora_rank") + facts.number("rope.dimension_count")
        return n_ctx * n_layers * width * _F16
    n_head = facts.number("attention.head_count", 1)
    per_head = facts.number("embedding_length") // max(1, n_head)
    k = facts.number("attention.key_length", per_head)
    v = facts.number("attention.value_length", per_head)
    return n_ctx * n_layers * facts.number("attention.head_count_kv", n_head) * (k + v) * _F16


def compute_bytes(facts: ModelFacts, n_ctx: int, n_ubatch: int) -> int:
    """Compute buffers of a ubatch: logits, activations, expert products and attention scores."""
    embd = facts.number("embedding_length")
    n_vocab = max((p.entry.shape[-1] for n, p in facts.weights.items() if n == "token_embd.weight"),
                  default=0)  # fmt: skip
    experts = facts.n_experts_used * facts.number("expert_feed_forward_length")
    widest = max(embd, facts.number("feed_forward_length"), experts)
    row = n_vocab + _ACTIVATIONS * embd + 3 * widest + 2 * facts.n_experts_used * embd
    scores = min(n_ctx, 8192) * facts.number("attention.head_count", 1)
    return n_ubatch * (row + scores) * _F32


def recurrent_bytes(facts: ModelFacts, n_rs_seq: int) -> int:
    """The recurrent state of one sequence in f32, its `n_rs_seq` snapshots and a checkpoint, as if
    every layer had one."""
    d_state, d_inner = facts.number("ssm.state_size"), facts.number("ssm.inner_size")
    convolved = d_inner + 2 * facts.number("ssm.group_count") * d_state
    width = d_state * d_inner + max(0, facts.number("ssm.conv_kernel") - 1) * convolved
    return (2 + n_rs_seq) * facts.n_layers * width * _F32


def context_bytes(facts: ModelFacts, n_ctx: int, n_ubatch: int, n_rs_seq: int = 0) -> int:
    """All of it for one model."""
    state = recurrent_bytes(facts, n_rs_seq)
    return kv_bytes(facts, n_ctx) + state + compute_bytes(facts, n_ctx, n_ubatch)
