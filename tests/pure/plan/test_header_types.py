"""A header whose tensors have types that no kernel reads is refused in one sentence."""

from __future__ import annotations

import pytest

from offload.header_check import type_reasons
from offload.model import TensorEntry

NO_WEIGHTS = ("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K")
WEIGHTS = ("f32", "f16", "bf16", "q4_0", "q8_0", "q4_K", "q6_K", "iq4_xs", "tq2_0", "mxfp4")
MATRICES = (
    "blk.1.ssm_dt.weight",  # of Mamba and Jamba
    *("token_embd.weight", "output.weight", "blk.3.attn_q.weight", "blk.0.ffn_gate_inp.weight"),
    *("blk.1.ffn_up_exps.weight", "blk.1.attn_kv_b.weight", "blk.2.ssm_in.weight"),
    *("blk.2.hc_attn_fn.weight", "blk.4.nextn.eh_proj.weight", "per_layer_token_embd.weight"),
)
FLOATS = (
    *("blk.0.attn_norm.weight", "blk.0.attn_q.bias", "blk.1.ffn_gate_exps.bias", "blk.2.ssm_a"),
    *("blk.2.ssm_conv1d.weight", "blk.2.ssm_conv1d_q.weight", "blk.0.attn_sinks.weight"),
    *("rope_freqs.weight", "rope_factors_long.weight", "blk.5.shortconv.conv.weight"),
    *(
        "blk.2.ssm_d",
        "blk.2.ssm_dt",
        "blk.2.ssm_dt.bias",
        "blk.1.exp_probs_b.bias",
        "blk.1.hc_attn_norm.weight",
    ),
)


def reasons(name: str, kind: str, shape: tuple[int, ...] = (128, 16)) -> list[str]:
    return list(type_reasons([TensorEntry(name, kind, shape, 0, 4096)]))


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_may_have_every_type_of_weights(name: str) -> None:
    assert not any(reasons(name, kind) for kind in WEIGHTS)
    for kind in NO_WEIGHTS:
        (words,) = reasons(name, kind)
        assert words == (
            f"{name} has the type {kind}, in which no weights are multiplied; the file is damaged"
        )


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", [*NO_WEIGHTS, *WEIGHTS])
def test_what_is_no_factor_of_a_product_has_floats(name: str, kind: str) -> None:
    found = reasons(name, kind)
    assert found == (
        []
        if kind == "f32"
        else [f"{name} has the type {kind}, and must have f32; the file is damaged"]
    )


def test_vectors_are_floats_unless_they_are_factors() -> None:
    assert reasons("blk.0.any.weight", "f16", (128,))
    assert not reasons("blk.0.ffn_gate_inp_shexp.weight", "f16", (128,))
    assert reasons("blk.0.ffn_gate_inp_shexp.weight", "i32", (128,))


def test_tables_have_whole_numbers() -> None:
    for name in ("d2t", "blk.0.ffn_gate_tid2eid.weight"):
        assert [kind for kind in (*NO_WEIGHTS, *WEIGHTS) if not reasons(name, kind)] == [
            "i32",
            "i64",
        ]
