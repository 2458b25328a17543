"""Tiny shapes of every architecture of the library whose graph multiplies routed experts.

`scripts/lab/run architectures --source FOLDER` compares the names with the library's source. The
values are the least that each architecture's graph accepts; no published model has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.synth.shape import SIGMOID, Shape, Value
from lab.synth.write import plan_shape, write

RELEASE = "0.3.36"  # of llama-cpp-python, in whose library all of these were found
N_VOCAB = 512
N_EXPERTS, N_USED = 8, 2

# What people know each architecture by.
MODELS: Mapping[str, str] = {
    "afmoe": "Trinity (Arcee)",
    "arctic": "Snowflake Arctic",
    "bailingmoe": "Ling 1",
    "bailingmoe2": "Ling 2, Ring 2",
    "bailingmoe3": "Ling 3",
    "cohere2moe": "Command-A mixtures",
    "dbrx": "DBRX",
    "deepseek": "DeepSeek-MoE 16B",
    "deepseek2": "DeepSeek-V2, V3, R1, Kimi-K2, GLM-4.7-Flash",
    "deepseek32": "DeepSeek-V3.2",
    "deepseek4": "DeepSeek-V4",
    "dots1": "dots.llm1",
    "dots3note": "dots3",
    "ernie4_5-moe": "ERNIE 4.5",
    "exaone-moe": "K-EXAONE",
    "gemma4": "Gemma 4 with experts",
    "glm-dsa": "GLM-5",
    "glm4moe": "GLM-4.5, 4.6, 4.7",
    "glm5-next": "GLM-5.3-Flash",
    "gpt-oss": "gpt-oss",
    "granite": "Granite",
    "granite_swa": "Granite with windows",
    "granitehybrid": "Granite 4 H",
    "granitemoe": "Granite 3 MoE",
    "grok": "Grok 1, 2",
    "grovemoe": "GroveMoE",
    "hunyuan-moe": "Hunyuan-A13B",
    "hy_v3": "Hunyuan 3",
    "hy_v4": "Hunyuan 4",
    "jamba": "Jamba",
    "kimi-k3": "Kimi-K3",
    "kimi-linear": "Kimi-Linear",
    "laguna": "Laguna",
    "lfm2moe": "LFM2 MoE",
    "llama": "Mixtral",
    "llama4": "Llama 4 Scout, Maverick",
    "maple": "Maple",
    "mellum": "Mellum",
    "mimo2": "MiMo-V2",
    "minimax-01": "MiniMax-Text-01",
    "minimax-m2": "MiniMax-M2",
    "minimax-m3": "MiniMax-M3",
    "mistral3": "Ministral, Mistral 3",
    "mistral4": "Mistral 4",
    "nemotron_h_moe": "Nemotron 3 Nano",
    "olmoe": "OLMoE",
    "phimoe": "Phi-3.5-MoE",
    "qwen2moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen35moe": "Qwen3.5, Qwen3.6 with experts",
    "qwen3moe": "Qwen3-30B-A3B, Qwen3-235B-A22B",
    "qwen3next": "Qwen3-Next, Qwen3-Coder-Next",
    "qwen3vlmoe": "Qwen3-VL with experts",
    "qwen4exp": "Qwen3.8-Flash-Next",
    "smallthinker": "SmallThinker",
    "step35": "Step 3.5",
}
# Mixtures that no text is generated with token by token, and what happens with them.
REFUSED: Mapping[str, str] = {
    "dflash": "a draft for another model, which `--draft` names; alone it is refused when it is "
    "opened",
    "graniteswitch": "needs adapters in the file, of which no shape is known to us; refused when "
    "it is opened",
    "llada-moe": "writes by diffusion, without a KV cache; refused when it is opened",
    "llama-embed": "an encoder for embeddings, which continues no text; refused when it is opened",
    "nomic-bert-moe": "an encoder for embeddings, which continues no text; refused when it is "
    "opened",
    "rnd1": "writes by diffusion, without a KV cache; refused when it is opened",
}
# Architectures whose graph is another's: the same function, called for a model without experts.
SAME_GRAPH: Mapping[str, str] = {
    "bert": "nomic-bert-moe", "lfm2": "lfm2moe", "nemotron_h": "nemotron_h_moe", "phi3": "phimoe",
    "granite": "granitemoe",
}  # fmt: skip
ARCHITECTURES = tuple(MODELS)

_MLA = frozenset(
    {"deepseek2", "deepseek32", "glm-dsa", "dots3note", "kimi-linear", "bailingmoe3", "kimi-k3",
     "glm5-next", "mistral4", "hy_v4"}
)  # fmt: skip
_KDA = frozenset({"kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next"})
_ALTERNATING = _KDA | {"jamba", "nemotron_h_moe", "granitehybrid", "lfm2moe"}
_WINDOWED = frozenset(
    {"afmoe", "cohere2moe", "deepseek4", "dots3note", "exaone-moe", "gemma4", "gpt-oss",
     "granite_swa", "laguna", "llama4", "maple", "mellum", "mimo2", "smallthinker", "step35"}
)  # fmt: skip
_LISTED_WINDOWS = frozenset({"cohere2moe", "dots3note", "granite_swa", "maple", "mimo2", "step35"})
_ALL_HEADS_HAVE_KEYS = frozenset({"dots1", "minimax-m3", "olmoe"})


def mixture_shape(architecture: str, quant: str = "q8_0") -> Shape:
    """A tiny shape of an architecture of `ARCHITECTURES`."""
    without = (r"\.attn_kv_b\.weight$",) if architecture in _KDA else ()
    metadata = {**_common(architecture), **_own(architecture)}
    return Shape(
        architecture, architecture, metadata, N_VOCAB, without=without, quant=quant, unchecked=True
    )


def write_mixture(architecture: str, path: Path, quant: str = "q8_0", seed: int = 1) -> Path:
    """Write a tiny random model of an architecture of `ARCHITECTURES`."""
    return write(plan_shape(mixture_shape(architecture, quant)), path, seed)


def _sizes(architecture: str) -> tuple[int, int, int]:
    """The numbers of layers and heads, and the width."""
    n_layers = 5 if architecture == "gemma4" else 4
    n_embd = 256 if architecture == "deepseek4" else 128
    return n_layers, 2 if architecture in _MLA else 4, n_embd


def _alternating(n: int, even: int, odd: int) -> tuple[int, ...]:
    return tuple(odd if i % 2 else even for i in range(n))


def _common(architecture: str) -> dict[str, Value]:
    n_layers, n_head, n_embd = _sizes(architecture)
    head = n_embd // n_head
    return {
        "block_count": n_layers, "context_length": 4096, "embedding_length": n_embd,
        "feed_forward_length": 128, "leading_dense_block_count": 1, "full_attention_interval": 2,
        "use_parallel_residual": False, "logit_scale": 1.0, "residual_scale": 1.0,
        "embedding_scale": 1.0, "rope.freq_base": 1e4, "attention.scale": 0.125,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
        "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 1.0,
        "attention.q_lora_rank": 32, "attention.kv_lora_rank": 32,
        "attention.indexer.head_count": 4, "attention.indexer.key_length": 64,
        "attention.indexer.top_k": 4096, "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4, "attention.indexer.kpool_select_tail": True,
        "attention.indexer.local_blocks": 1, "attn_res.block_size": 12,
        "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0,
        "expert_count": N_EXPERTS, "expert_used_count": N_USED, "expert_feed_forward_length": 64,
        "expert_shared_feed_forward_length": 32, "expert_shared_count": 1,
        "expert_gating_func": SIGMOID, "expert_latent_length": 64, "moe_latent_size": 64,
        "interleave_moe_layer_step": 1, "moe_every_n_layers": 1, "expert_weights_scale": 1.0,
        "expert_weights_norm": True, "expert_group_scale": 1.0, "experts_per_group": 1,
        "ssm.inner_size": 2 * n_embd, "ssm.conv_kernel": 4, "ssm.state_size": 32,
        "ssm.time_step_rank": n_head, "ssm.group_count": 2,
        "rope.dimension_sections": (head // 8,) * 4,
        **_heads(architecture),
    }  # fmt: skip


def _heads(architecture: str) -> dict[str, Value]:
    n_layers, n_head, n_embd = _sizes(architecture)
    head = n_embd // n_head
    heads: Value = n_head
    heads_kv: Value = n_head if architecture in _ALL_HEADS_HAVE_KEYS else n_head // 2
    if architecture in _ALTERNATING:
        heads = n_head if architecture == "glm5-next" else _alternating(n_layers, n_head, 0)
        heads_kv = _alternating(n_layers, n_head, 0)
    found: dict[str, Value] = {
        "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head,
    }  # fmt: skip
    if architecture in _MLA:
        turned = 0 if architecture == "glm5-next" else 32  # values that rotary positions turn
        heads_kv = _alternating(n_layers, 1, 0) if architecture in _ALTERNATING else 1
        found |= {
            "attention.key_length": 32 + turned, "attention.value_length": 32,
            "attention.key_length_mla": 32 + turned, "attention.value_length_mla": 32,
            "rope.dimension_count": turned,
        }  # fmt: skip
    elif architecture == "deepseek4":
        heads_kv = 1
        found["rope.dimension_count"] = head // 2
    if architecture in _WINDOWED:
        found["attention.sliding_window"] = 64
        listed = architecture in _LISTED_WINDOWS
        pattern: Value = _alternating(n_layers, 0, 1) if listed else 2
        found["attention.sliding_window_pattern"] = pattern
    if architecture in _KDA:
        found |= {"kda.head_dim": 32, "kda.safe_gate": True, "kda.gate_lower_bound": -5.0}
    return found | {"attention.head_count": heads, "attention.head_count_kv": heads_kv}


def _own(architecture: str) -> dict[str, Value]:
    """Values that only this architecture, or its family, reads."""
    n_layers, n_head, n_embd = _sizes(architecture)
    head = n_embd // n_head
    streams: dict[str, Value] = {
        "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6, "hyper_connection.low_rank": 8,
    }  # fmt: skip
    indexed: dict[str, Value] = {"attention.indexer.types": _alternating(n_layers, 1, 0)}
    delta_net: dict[str, Value] = {"ssm.inner_size": n_embd}
    own: dict[str, dict[str, Value]] = {
        "lfm2moe": {"shortconv.l_cache": 3},
        "jamba": {"ssm.group_count": 0},
        "nemotron_h_moe": {"feed_forward_length": (0, 64, 64, 0)},
        "maple": {"swiglu_clamp_exp": 7.0},
        "minimax-m3": {"attention.indexer.head_count": n_head},
        "qwen35moe": delta_net,
        "qwen3next": delta_net,
        "gemma4": {
            "embedding_length_per_layer_input": 64, "attention.shared_kv_layers": 0,
            "attention.key_length_swa": head, "attention.value_length_swa": head,
            "rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": (1, 1, 1, 1, 0),
        },
        "dots3note": {
            "attention.kv_lora_rank_swa": 32, "attention.key_length_swa": 64,
            "attention.value_length_swa": 32, "attention.key_length_mla_swa": 64,
            "attention.value_length_mla_swa": 32, "rope.freq_base_swa": 1e4, **indexed,
        },
        "bailingmoe3": {
            "rope.dimension_sections": (4, 6, 6, 0),
            "swiglu_clamp_exp": (0.0, *[4.0] * (n_layers - 1)),  # type: ignore[arg-type]
            "swiglu_clamp_shexp": (0.0, *[5.0] * (n_layers - 1)),  # type: ignore[arg-type]
        },
        "hy_v4": {
            **streams, **indexed, "hyper_connection.magnitude": 2.0, "swiglu_clamp_exp": 10.0,
        },
        "deepseek4": {
            **streams, "attention.output_group_count": 4, "attention.output_lora_rank": 32,
            "attention.compress_ratios": (0, 0, 4, 128), "hash_layer_count": 0,
            "attention.compress_rope_freq_base": 160000.0, "swiglu_clamp_exp": 10.0,
            "expert_gating_func": 4,
        },
        "glm5-next": {**streams, "attention.compress_ratios": (4,) * n_layers},
        "qwen4exp": {
            **streams, **delta_net, "attention.compress_ratios": (4,) * n_layers,
            "attention.indexer.key_length": head, "ple.layers": (0,), "ple.ngram_size": 3,
            "ple.heads_per_ngram": 2, "ple.conv_kernel": 4, "ple.eos_token_id": 0,
            "ple.layer_multipliers": (1, 3, 5), "embedding_length_per_layer_input": n_embd // 4,
            "ple.head_offsets": tuple(N_VOCAB * i for i in range(4)),
            "ple.head_vocab_sizes": (N_VOCAB,) * 4,
        },
    }  # fmt: skip
    return own.get(architecture, {})


def mtp_architectures_of(source: Path) -> Iterator[str]:
    """The names of all architectures of llama.cpp's source with a graph of MTP layers.

    `source` is llama.cpp's folder `src`.
    """
    makes = re.compile(
        r"llama_model_(\w+)::build_arch_graph(?:(?!\n}).)*make_unique<graph_mtp>", re.S
    )
    classes = {
        name
        for path in (source / "models").glob("*.cpp")
        for name in makes.findall(path.read_text("utf-8"))
    }
    yield from (name for name, its in _classes_by_name(source) if its in classes)


def _classes_by_name(source: Path) -> list[tuple[str, str]]:
    """Return (name of the architecture, name of the class of its model)."""
    names = dict(
        re.findall(r'\{\s*(LLM_ARCH_\w+),\s*"([^"]+)"', (source / "llama-arch.cpp").read_text())
    )
    made = r"case (LLM_ARCH_\w+):\s*\n\s*return new llama_model_(\w+)\("
    found = re.findall(made, (source / "llama-model.cpp").read_text("utf-8"))
    return [(names[key], its) for key, its in found]


def architectures_of(source: Path) -> Iterator[str]:
    """The names of all architectures of llama.cpp's source whose graph multiplies experts.

    `source` is llama.cpp's folder `src`. A class of a model counts if one of its files, or a file
    of the class that it derives from, calls a function that multiplies by ids of experts.
    """
    texts = {path: path.read_text("utf-8") for path in (source / "models").glob("*.cpp")}
    multiplies = {p for p, t in texts.items() if re.search(r"build_moe_ffn|mul_mat_id", t)}
    files: dict[str, set[Path]] = {}
    for path, text in texts.items():
        for name in re.findall(r"\bllama_model_(\w+)::", text):
            files.setdefault(name, set()).add(path)
    header = (source / "models" / "models.h").read_text("utf-8")
    bases = dict(re.findall(r"struct llama_model_(\w+)\s*:\s*public llama_model_(\w+)", header))
    found: dict[str, bool] = {}
    for architecture, name in _classes_by_name(source):
        its: set[Path] = set()
        base: str | None = name
        while base is not None:
            its |= files.get(base, set())
            base = bases.get(base)
        found[architecture] = bool(its & multiplies)
    for name, other in SAME_GRAPH.items():
        found[other] = found[other] or found[name]
        found[name] &= name in MODELS  # without experts it is no mixture
    yield from (name for name, is_mixture in found.items() if is_mixture)
