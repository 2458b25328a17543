"""The named shapes: metadata of published models, and the tiny model each shrinks to.

The numbers are those of the models' published configurations. Layers for multi-token prediction are
there where llama.cpp's conversion writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lab.synth.parts import (
    NO_OWN_VOCABULARY,
    QKV_BIAS,
    SIGMOID,
    SOFTMAX,
    TIED,
    TINY_DEEPSEEK,
    TINY_DENSE,
    TINY_HYBRID,
    TINY_MOE,
    TINY_SPARSE,
    Metadata,
    Preset,
    Value,
    body,
    delta_net,
    experts,
    heads,
    indexer,
    metadata,
    mla,
    nextn,
    yarn,
)


def _deepseek(name: str, about: str, full: Metadata, n_vocab: int, **tiny: Value) -> Preset:
    return Preset(name, "deepseek2", about, full, n_vocab, metadata(TINY_DEEPSEEK, tiny))


_V3_GATE = {"weights_norm": True, "gating_func": SIGMOID}
_DEEPSEEK = (
    _deepseek(
        "deepseek-v3",
        "DeepSeek-V3, V3.1 and R1, 671B",
        metadata(
            body(61, 7168, 18432, 163840, 1e-6),
            mla(128, 1536, 512, 128, 64, 128),
            experts(256, 8, 2048, shared_count=1, weights_scale=2.5, **_V3_GATE),
            {"expert_group_count": 8, "expert_group_used_count": 4},
            yarn(40.0, 4096, yarn_log_multiplier=0.1),
            leading_dense_block_count=3,
        ),
        129280,
        expert_group_count=4,
        expert_group_used_count=2,
    ),
    _deepseek(
        "kimi-k2",
        "Kimi-K2, 1T",
        metadata(
            body(61, 7168, 18432, 131072, 1e-6),
            mla(64, 1536, 512, 128, 64, 128, 50000.0),
            experts(384, 8, 2048, shared_count=1, weights_scale=2.827, **_V3_GATE),
            yarn(32.0, 4096, yarn_log_multiplier=0.1),
            leading_dense_block_count=1,
        ),
        163840,
    ),
    _deepseek(
        "deepseek-v2",
        "DeepSeek-V2, 236B",
        metadata(
            body(60, 5120, 12288, 163840, 1e-6),
            mla(128, 1536, 512, 128, 64, 128),
            experts(160, 6, 1536, shared_count=2, weights_scale=16.0, gating_func=SOFTMAX),
            {"expert_group_count": 8, "expert_group_used_count": 3},
            yarn(40.0, 4096, yarn_log_multiplier=0.1),
            leading_dense_block_count=1,
        ),
        102400,
        expert_group_count=4,
        expert_group_used_count=2,
        expert_weights_scale=1.0,
    ),
    _deepseek(
        "deepseek-v2-lite",
        "DeepSeek-V2-Lite, 16B: no low rank for the queries",
        metadata(
            body(27, 2048, 10944, 163840, 1e-6),
            mla(16, 0, 512, 128, 64, 128),
            experts(64, 6, 1408, shared_count=2, weights_scale=1.0, gating_func=SOFTMAX),
            yarn(40.0, 4096, yarn_log_multiplier=0.0707),
            leading_dense_block_count=1,
        ),
        102400,
        **{"attention.q_lora_rank": 0},
    ),
    Preset(
        "deepseek-v3.2",
        "deepseek32",
        "DeepSeek-V3.2, 671B: sparse attention, one layer for multi-token prediction",
        metadata(
            body(62, 7168, 18432, 163840, 1e-6),
            mla(128, 1536, 512, 128, 64, 128),
            experts(256, 8, 2048, shared_count=1, weights_scale=2.5, **_V3_GATE),
            {"expert_group_count": 8, "expert_group_used_count": 4},
            yarn(40.0, 4096, yarn_log_multiplier=0.1),
            indexer(64, 128, 2048),
            nextn(),
            leading_dense_block_count=3,
        ),
        129280,
        metadata(TINY_SPARSE, expert_group_count=4, expert_group_used_count=2),
        without=NO_OWN_VOCABULARY,
    ),
)

_GLM_355B = metadata(
    heads(96, 8, 128, 64, 1e6),
    experts(160, 8, 1536, shared_count=1, weights_scale=2.5, **_V3_GATE),
    leading_dense_block_count=3,
)
_GLM = (
    Preset(
        "glm-4.5",
        "glm4moe",
        "GLM-4.5, 355B, without its layer for multi-token prediction",
        metadata(body(92, 5120, 12288, 131072, 1e-5), _GLM_355B),
        151552,
        metadata(TINY_MOE, {"rope.dimension_count": 16}, leading_dense_block_count=1),
    ),
    Preset(
        "glm-4.6",
        "glm4moe",
        "GLM-4.6, 355B: one layer for multi-token prediction",
        metadata(body(93, 5120, 12288, 202752, 1e-5), _GLM_355B, nextn()),
        151552,
        metadata(
            TINY_MOE, {"rope.dimension_count": 16}, leading_dense_block_count=1, block_count=5
        ),
    ),
    Preset(
        "glm-5",
        "glm-dsa",
        "GLM-5, 744B: sparse attention, one layer for multi-token prediction",
        metadata(
            body(79, 6144, 12288, 202752, 1e-5),
            mla(64, 2048, 512, 192, 64, 256, 1e6),
            experts(256, 8, 2048, shared_count=1, weights_scale=2.5, **_V3_GATE),
            indexer(32, 128, 2048),
            nextn(),
            leading_dense_block_count=3,
        ),
        154880,
        TINY_SPARSE,
        without=NO_OWN_VOCABULARY,
    ),
    Preset(
        "glm-4.5-air",
        "glm4moe",
        "GLM-4.5-Air, 106B: no query and key norms",
        metadata(
            body(46, 4096, 10944, 131072, 1e-5),
            heads(96, 8, 128, 64, 1e6),
            experts(128, 8, 1408, shared_count=1, weights_scale=1.0, **_V3_GATE),
            leading_dense_block_count=1,
        ),
        151552,
        metadata(TINY_MOE, {"rope.dimension_count": 16}),
        without=(r"\.attn_[qk]_norm\.weight$",),
    ),
)

_QWEN = (
    Preset(
        "qwen3-235b-a22b",
        "qwen3moe",
        "Qwen3-235B-A22B",
        metadata(
            body(94, 4096, 12288, 40960, 1e-6),
            heads(64, 4, 128, 128, 1e6),
            experts(128, 8, 1536),
        ),
        151936,
        TINY_MOE,
        without=(QKV_BIAS,),
    ),
    Preset(
        "qwen3-30b-a3b",
        "qwen3moe",
        "Qwen3-30B-A3B",
        metadata(
            body(48, 2048, 6144, 40960, 1e-6),
            heads(32, 4, 128, 128, 1e6),
            experts(128, 8, 768),
        ),
        151936,
        TINY_MOE,
        without=(QKV_BIAS,),
    ),
    Preset(
        "qwen3-next-80b-a3b",
        "qwen3next",
        "Qwen3-Next-80B-A3B: three of four layers are gated delta nets",
        metadata(
            body(48, 2048, 5120, 262144, 1e-6),
            heads(16, 2, 256, 64, 1e7),
            experts(512, 10, 512, shared_feed_forward_length=512),
            delta_net(32, 16, 128),
        ),
        151936,
        metadata(TINY_HYBRID, {"rope.dimension_count": 16}),
        without=(QKV_BIAS, r"\.ssm_in\.weight$"),
    ),
    Preset(
        "qwen3.5-35b-a3b",
        "qwen35moe",
        "Qwen3.5-35B-A3B: three of four layers are gated delta nets",
        metadata(
            body(40, 2048, 5120, 262144, 1e-6),
            heads(16, 2, 256, 64, 1e7),
            experts(256, 8, 512, shared_feed_forward_length=512),
            delta_net(32, 16, 128),
            {"rope.dimension_sections": (11, 11, 10, 0)},
        ),
        248320,
        metadata(
            TINY_HYBRID,
            {"rope.dimension_count": 16, "rope.dimension_sections": (3, 3, 2, 0)},
        ),
        without=(QKV_BIAS,),
    ),
    Preset(
        "qwen3.5-122b-a10b",
        "qwen35moe",
        "Qwen3.5-122B-A10B: three of four layers are gated delta nets",
        metadata(
            body(48, 3072, 5120, 262144, 1e-6),
            heads(32, 2, 256, 64, 1e7),
            experts(256, 8, 1024, shared_feed_forward_length=1024),
            delta_net(64, 16, 128),
            {"rope.dimension_sections": (11, 11, 10, 0)},
        ),
        248320,
        metadata(
            TINY_HYBRID,
            {"rope.dimension_count": 16, "rope.dimension_sections": (3, 3, 2, 0)},
        ),
        without=(QKV_BIAS,),
    ),
    Preset(
        "qwen2.5-32b",
        "qwen2",
        "Qwen2.5-32B and Qwen2.5-Coder-32B",
        metadata(body(64, 5120, 27648, 32768, 1e-6), heads(40, 8, 128, 128, 1e6)),
        152064,
        TINY_DENSE,
        without=(r"^output\.bias$",),
        square_attention=True,
    ),
    Preset(
        "qwen2.5-72b",
        "qwen2",
        "Qwen2.5-72B",
        metadata(body(80, 8192, 29568, 32768, 1e-6), heads(64, 8, 128, 128, 1e6)),
        152064,
        TINY_DENSE,
        without=(r"^output\.bias$",),
        square_attention=True,
    ),
    Preset(
        "qwen2.5-0.5b",
        "qwen2",
        "Qwen2.5-0.5B, a draft; tied embeddings",
        metadata(body(24, 896, 4864, 32768, 1e-6), heads(14, 2, 64, 64, 1e6)),
        151936,
        TINY_DENSE,
        without=(r"^output\.bias$", TIED),
        quant="q8_0",
        square_attention=True,
    ),
    Preset(
        "qwen3-0.6b",
        "qwen3",
        "Qwen3-0.6B, a draft; heads wider than n_embd / n_head, tied embeddings",
        metadata(body(28, 1024, 3072, 40960, 1e-6), heads(16, 8, 128, 128, 1e6)),
        151936,
        metadata(
            TINY_DENSE,
            {
                "attention.key_length": 48,
                "attention.value_length": 48,
                "rope.dimension_count": 48,
            },
        ),
        without=(QKV_BIAS, TIED, r"^cls\."),
        quant="q8_0",
    ),
)

_LLAMA_BIAS = r"\.(attn|ffn)_.*\.bias$"
_ROPE_FREQS = r"^rope_freqs\.weight$"
_LLAMA = (
    Preset(
        "mistral-large",
        "llama",
        "Mistral-Large-2, 123B dense",
        metadata(body(88, 12288, 28672, 131072, 1e-5), heads(96, 8, 128, 128, 1e6)),
        32768,
        TINY_DENSE,
        without=(_LLAMA_BIAS, _ROPE_FREQS),
    ),
    Preset(
        "mistral-7b",
        "llama",
        "Mistral-7B v0.3, a draft for mistral-large",
        metadata(body(32, 4096, 14336, 32768, 1e-5), heads(32, 8, 128, 128, 1e6)),
        32768,
        TINY_DENSE,
        without=(_LLAMA_BIAS, _ROPE_FREQS),
    ),
    Preset(
        "llama-3.3-70b",
        "llama",
        "Llama-3.3-70B",
        metadata(body(80, 8192, 28672, 131072, 1e-5), heads(64, 8, 128, 128, 5e5)),
        128256,
        TINY_DENSE,
        without=(_LLAMA_BIAS,),
    ),
)


def _llama4(name: str, about: str, n_experts: int, step: int, n_ctx: int) -> Preset:
    return Preset(
        name,
        "llama4",
        about,
        metadata(
            body(48, 5120, 16384, n_ctx, 1e-5),
            heads(40, 8, 128, 128, 5e5),
            experts(n_experts, 1, 8192),
            interleave_moe_layer_step=step,
        ),
        202048,
        metadata(TINY_MOE, interleave_moe_layer_step=step, expert_used_count=1),
        # Only the larger one has no norm of queries and keys, which takes no weights here.
        without=(_LLAMA_BIAS,),
    )


_LLAMA4 = (
    _llama4(
        "llama-4-maverick", "Llama-4-Maverick, 400B: every second layer is dense", 128, 2, 1 << 20
    ),
    _llama4("llama-4-scout", "Llama-4-Scout, 109B", 16, 1, 10 << 20),
)

_LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
_OTHERS = (
    Preset(
        "command-a",
        "cohere2",
        "Command-A, 111B dense",
        metadata(
            body(64, 12288, 36864, 131072, 1e-5),
            heads(96, 8, 128, 128, 50000.0),
            _LAYER_NORM,
            {"attention.sliding_window": 4096, "logit_scale": 0.25},
        ),
        256000,
        metadata(TINY_DENSE, {"attention.sliding_window": 64}),
        without=(QKV_BIAS,),
        square_attention=True,
    ),
    Preset(
        "command-r7b",
        "cohere2",
        "Command-R7B, a draft for command-a",
        metadata(
            body(32, 4096, 14336, 131072, 1e-5),
            heads(32, 8, 128, 128, 50000.0),
            _LAYER_NORM,
            {"attention.sliding_window": 4096, "logit_scale": 0.25},
        ),
        256000,
        metadata(TINY_DENSE, {"attention.sliding_window": 64}),
        without=(QKV_BIAS,),
        square_attention=True,
    ),
    Preset(
        "gemma-2-27b",
        "gemma2",
        "Gemma-2-27B",
        metadata(
            body(46, 4608, 36864, 8192, 1e-6),
            heads(32, 16, 128, 128, 10000.0),
            {
                "attention.sliding_window": 4096,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        ),
        256000,
        metadata(TINY_DENSE, {"attention.sliding_window": 64}),
        without=(QKV_BIAS,),
    ),
    Preset(
        "gemma-2-2b",
        "gemma2",
        "Gemma-2-2B, a draft for gemma-2-27b",
        metadata(
            body(26, 2304, 9216, 8192, 1e-6),
            heads(8, 4, 256, 256, 10000.0),
            {
                "attention.sliding_window": 4096,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
        ),
        256000,
        metadata(TINY_DENSE, {"attention.sliding_window": 64}),
        without=(QKV_BIAS,),
    ),
    Preset(
        "gemma-3n-e4b",
        "gemma3n",
        "Gemma-3n-E4B: two thirds of its weights are embeddings of each layer",
        metadata(
            body(35, 2048, 16384, 32768, 1e-6),
            heads(8, 2, 256, 256, 1e6),
            {
                "attention.sliding_window": 512,
                "attention.shared_kv_layers": 15,
                "embedding_length_per_layer_input": 256,
            },
        ),
        262400,
        # The library takes keys and values of 20 layers to be there.
        metadata(TINY_DENSE, {"attention.sliding_window": 64, "block_count": 21}),
        without=(QKV_BIAS, TIED),
    ),
    Preset(
        "minimax-m2",
        "minimax-m2",
        "MiniMax-M2, 230B",
        metadata(
            body(62, 3072, 1536, 196608, 1e-6),
            heads(48, 8, 128, 64, 5e6),
            experts(256, 8, 1536, gating_func=SIGMOID),
        ),
        200064,
        metadata(TINY_MOE, {"rope.dimension_count": 16}, feed_forward_length=64),
        without=(QKV_BIAS,),
    ),
    Preset(
        "gpt-oss-120b",
        "gpt-oss",
        "gpt-oss-120b: MXFP4 experts with biases, attention sinks",
        metadata(
            body(36, 2880, 2880, 131072, 1e-5),
            heads(64, 8, 64, 64, 150000.0),
            experts(128, 4, 2880),
            yarn(32.0, 4096),
            {"attention.sliding_window": 128},
        ),
        201088,
        metadata(TINY_MOE, {"attention.sliding_window": 64}),
        quant="q8_0,experts=mxfp4",
        tiny_quant="q8_0,experts=mxfp4",
    ),
    Preset(
        "gpt-oss-20b",
        "gpt-oss",
        "gpt-oss-20b",
        metadata(
            body(24, 2880, 2880, 131072, 1e-5),
            heads(64, 8, 64, 64, 150000.0),
            experts(32, 4, 2880),
            yarn(32.0, 4096),
            {"attention.sliding_window": 128},
        ),
        201088,
        metadata(TINY_MOE, {"attention.sliding_window": 64}),
        quant="q8_0,experts=mxfp4",
        tiny_quant="q8_0,experts=mxfp4",
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {p.name: p for p in (*_DEEPSEEK, *_GLM, *_QWEN, *_LLAMA, *_LLAMA4, *_OTHERS)}
)
# Other names people use, and the architectures themselves.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek-r1": "deepseek-v3",
        "deepseek2": "deepseek-v3",
        "deepseek32": "deepseek-v3.2",
        "glm-dsa": "glm-5",
        "llama4": "llama-4-maverick",
        "gemma3n": "gemma-3n-e4b",
        "mistral-large-2411": "mistral-large",
        "glm4moe": "glm-4.5",
        "qwen3moe": "qwen3-30b-a3b",
        "qwen3next": "qwen3-next-80b-a3b",
        "qwen35moe": "qwen3.5-35b-a3b",
        "qwen2": "qwen2.5-72b",
        "qwen3": "qwen3-0.6b",
        "llama": "mistral-large",
        "cohere2": "command-a",
        "gemma2": "gemma-2-27b",
        "gpt-oss": "gpt-oss-120b",
    }
)
