"""Shapes and token ids of the two demo models, as plain data. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 20240
N_VOCAB = 4096
N_CTX = 2048
RMS_EPS = 1e-6
ROPE_BASE = 10000.0
EOS, IM_START, IM_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (EOS, IM_START, IM_END, PAD)
EOS_ID, IM_START_ID, IM_END_ID, PAD_ID = range(4)


@dataclass(frozen=True)
class TargetShape:
    """A DeepSeek-V3 shape (GGUF architecture deepseek2): MLA, then dense or routed feed-forward.

    With `nope + rope == v_dim`, queries, keys and values have the same head size. The fused
    attention kernel of torch's CPU backend requires that.
    """

    n_vocab: int = N_VOCAB
    n_layer: int = 4
    n_dense: int = 1
    embd: int = 256
    n_head: int = 4
    q_lora: int = 128
    kv_lora: int = 128
    nope: int = 32
    rope: int = 32
    v_dim: int = 64
    ff: int = 768
    ff_exp: int = 256
    n_exp: int = 16
    n_used: int = 4
    n_shared: int = 1
    weights_scale: float = 2.5


@dataclass(frozen=True)
class DraftShape:
    """A Llama shape (GGUF architecture llama) with tied embeddings, under 1.5M parameters."""

    n_vocab: int = N_VOCAB
    n_layer: int = 2
    embd: int = 160
    n_head: int = 5
    head_dim: int = 32
    ff: int = 512
