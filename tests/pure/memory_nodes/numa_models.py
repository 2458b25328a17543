"""Weight shapes of three large models, from their published configurations, as ggml stores them.

A weight has one row per output and one element per input. DeepSeek-V3's family has absorbed MLA
attention: attn_k_b and attn_v_b have one matrix per head, at 8 bits as in the usual files.
"""

from dataclasses import dataclass, replace

from numa.place import PlacedWeight

# ggml-common.h: (elements, bytes) of a block.
BLOCKS = {
    "f32": (1, 4), "f16": (1, 2), "q8_0": (32, 34), "q6_k": (256, 210), "q5_k": (256, 176),
    "q4_k": (256, 144), "q3_k": (256, 110), "q2_k": (256, 84), "iq4_xs": (256, 136),
    "iq2_xxs": (256, 66), "iq1_s": (256, 50),
}  # fmt: skip
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class MlaModel:
    n_embd: int
    n_experts: int
    n_ff_expert: int
    n_ff_dense: int
    n_heads: int
    n_vocab: int


DEEPSEEK_R1 = MlaModel(7168, 256, 2048, 18432, 128, 129280)
KIMI_K2 = MlaModel(7168, 384, 2048, 18432, 64, 163840)


Named = tuple[str, PlacedWeight]


def weight(
    name: str, n_in: int, n_out: int, quant: str, *, n: int = 1, routed: bool = False
) -> Named:
    """A named weight of `n` matrices. Like llama.cpp, uses q8_0 if rows are not whole blocks."""
    n_elements, n_bytes = BLOCKS[quant]
    if n_in % n_elements:
        quant = "q8_0"
        n_elements, n_bytes = BLOCKS[quant]
    return name, PlacedWeight(0, n_out, n_in // n_elements * n_bytes, n, routed)


def mixture(
    n_embd: int, n_ff: int, n_experts: int, n_ff_dense: int, n_vocab: int, quant: str
) -> list[Named]:
    return [
        weight("ffn_gate_inp", n_embd, n_experts, "f32"),
        weight("ffn_gate_exps", n_embd, n_ff, quant, n=n_experts, routed=True),
        weight("ffn_down_exps", n_ff, n_embd, quant, n=n_experts, routed=True),
        weight("ffn_gate_shexp", n_embd, n_ff, quant),
        weight("ffn_down_shexp", n_ff, n_embd, quant),
        weight("ffn_gate", n_embd, n_ff_dense, quant),
        weight("ffn_down", n_ff_dense, n_embd, quant),
        weight("output", n_embd, n_vocab, quant),
    ]


def mla_weights(model: MlaModel, quant: str) -> list[Named]:
    n_heads, n_embd = model.n_heads, model.n_embd
    return [
        weight("attn_q_a", n_embd, 1536, quant),
        weight("attn_q_b", 1536, n_heads * 192, quant),
        weight("attn_kv_a_mqa", n_embd, 576, quant),
        weight("attn_k_b", 128, 512, "q8_0", n=n_heads),
        weight("attn_v_b", 512, 128, "q8_0", n=n_heads),
        weight("attn_output", n_heads * 128, n_embd, quant),
        *mixture(
            n_embd, model.n_ff_expert, model.n_experts, model.n_ff_dense, model.n_vocab, quant
        ),
    ]


def glm_weights(quant: str) -> list[Named]:
    return [
        weight("attn_q", 5120, 96 * 128, quant),
        weight("attn_k", 5120, 8 * 128, quant),
        weight("attn_v", 5120, 8 * 128, quant),
        weight("attn_output", 96 * 128, 5120, quant),
        *mixture(5120, 1536, 160, 12288, 151552, quant),
    ]


def model_weights(model: str, quant: str) -> list[Named]:
    if model == "GLM-4.6":
        return glm_weights(quant)
    return mla_weights({"DeepSeek-R1": DEEPSEEK_R1, "Kimi-K2": KIMI_K2}[model], quant)


def packed(weights: list[Named]) -> tuple[dict[str, PlacedWeight], int]:
    """Lay weights out in a row, as ggml's allocator does. Returns them and their bytes in all."""
    placed: dict[str, PlacedWeight] = {}
    offset = 0
    for name, weight in weights:
        placed[name] = replace(weight, offset_bytes=offset)
        offset += -(-weight.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return placed, offset
