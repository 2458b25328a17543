"""The slot layout: one slot id per expert, types that share memory, and limits of kernels' ids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.plan.slot_layout import MOST_BLOCKS, SlotLayout, slot_layout

TYPES = ("q4_K", "q6_K", "q8_0", "f16", "f32", "q2_K", "q3_K", "q5_K", "iq3_xxs", "mxfp4", "q4_0")


@dataclass(frozen=True)
class Row:
    name: str
    type: str
    shape: tuple[int, ...]
    size_bytes: int


def weight(name: str, type_: str, *shape: int) -> Row:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_.upper()]]
    assert shape[0] % block == 0
    return Row(name, type_, shape, math.prod(shape) // block * size)


def experts(
    layer: int, types: Mapping[str, str], n_embd: int = 512, n_ff: int = 256, n_experts: int = 8
) -> list[Row]:
    shapes = {"gate": (n_embd, n_ff), "up": (n_embd, n_ff), "down": (n_ff, n_embd)}
    shapes["gate_up"] = (n_embd, 2 * n_ff)
    return [
        weight(f"blk.{layer}.ffn_{kind}_exps.weight", type_, *shapes[kind], n_experts)
        for kind, type_ in types.items()
    ]


def same(type_: str, *kinds: str) -> dict[str, str]:
    return dict.fromkeys(kinds or ("gate", "up", "down"), type_)


def layout_of(*layers: list[Row], n_experts: int = 8) -> SlotLayout:
    return slot_layout([row for layer in layers for row in layer], n_experts, 2)


def test_gate_up_and_down_of_an_expert_have_one_slot_number() -> None:
    layout = layout_of(*(experts(i, same("q4_K")) for i in range(3)))
    (pool,) = layout.pools
    expert_bytes = 512 * 256 // 256 * 144
    assert [(k.name, k.stride_bytes) for k in pool.kinds] == [
        ("gate", expert_bytes), ("up", expert_bytes), ("down", expert_bytes),
    ]  # fmt: skip
    assert (pool.n_slots, pool.n_experts, pool.n_used) == (3 * 8, 8, 2)
    assert layout.size_bytes == 3 * 8 * 3 * expert_bytes
    assert [group.layer for group in layout.groups] == [0, 1, 2]
    assert layout.places()["blk.1.ffn_up_exps.weight"] == (1, "up")


def test_layers_of_two_types_share_slots_of_whole_blocks_of_both() -> None:
    more = {"gate": "q4_K", "up": "q4_K", "down": "q6_K"}
    layout = layout_of(*(experts(i, more if i % 2 else same("q4_K"), 7168, 2048) for i in range(6)))
    (pool,) = layout.pools
    down = next(kind for kind in pool.kinds if kind.name == "down")
    assert down.stride_bytes % 144 == 0
    assert down.stride_bytes % 210 == 0
    assert down.stride_bytes < 1.02 * 7168 * 2048 / 256 * 210
    assert {sum(group.matrix_bytes.values()) for group in layout.groups} == {
        3 * 7168 * 8 * 144, 2 * 7168 * 8 * 144 + 7168 * 8 * 210,
    }  # fmt: skip


def test_layers_that_would_leave_much_of_a_slot_empty_have_a_pool_of_their_own() -> None:
    layout = layout_of(*(experts(i, same("q2_K")) for i in range(5)), experts(5, same("f16")))
    assert [(pool.name, pool.n_groups) for pool in layout.pools] == [
        ("experts", 5), ("experts 2", 1),
    ]  # fmt: skip
    assert [group.pool for group in layout.groups] == [0, 0, 0, 0, 0, 1]


def test_types_without_a_common_stride_have_pools_of_their_own() -> None:
    # Blocks of 98, 74 and 110 bytes. Their least common multiple is 199430 bytes.
    types = ("iq3_xxs", "iq2_xs", "q3_K")
    layout = layout_of(*(experts(i, same(type_), 256) for i, type_ in enumerate(types)))
    assert [group.pool for group in layout.groups] == [0, 0, 1]


def test_rows_that_kernels_read_past_share_with_nobody_else() -> None:
    # A matrix that is smaller than its slot is followed by bytes of another type, possibly NaN.
    some, others = experts(0, same("q4_0"), 512, 96), experts(1, same("q5_0"), 512, 96)
    assert len(layout_of(some, others).pools) == 2
    assert len(layout_of(some, experts(1, same("q4_0"), 512, 96)).pools) == 1


def test_dense_weights_of_one_shape_share_slots_whatever_their_type() -> None:
    rows = [
        weight(f"blk.{i}.{name}.weight", "q6_K" if i and name == "attn_v" else "q4_K", 512, 512)
        for i in range(4)
        for name in ("attn_q", "attn_v")
    ]
    layout = slot_layout([*rows, weight("blk.0.ffn_up.weight", "q4_K", 512, 1024)], 0, 0)
    assert [(pool.name, pool.n_groups, pool.n_experts) for pool in layout.pools] == [
        ("512x512", 8, 0), ("512x1024", 1, 0),
    ]  # fmt: skip
    assert layout.pools[0].slot_bytes >= 512 * 2 * 210


def test_no_more_slots_than_kernels_can_count_blocks() -> None:
    layers = [experts(i, same("mxfp4"), 2880, 2880, 128) for i in range(200)]
    (pool,) = layout_of(*layers, n_experts=128).pools
    assert pool.n_pieces > pool.n_slots == pool.most_slots
    stride, block = pool.kinds[0].stride_bytes, pool.kinds[0].block_bytes
    assert pool.n_slots * stride // block <= MOST_BLOCKS
    assert (pool.n_slots + 1) * stride // block > MOST_BLOCKS


def test_a_type_that_we_do_not_know_streams_too() -> None:
    rows = [
        Row(f"blk.{i}.ffn_{kind}_exps.weight", "q9_X", (64, 32, 8), 8 * 32 * 30)
        for i in range(2)
        for kind in ("gate", "up", "down")
    ]
    (pool,) = slot_layout(rows, 8, 2).pools
    assert pool.slot_bytes == 3 * 32 * 30


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({k: st.sampled_from(TYPES) for k in ("gate", "up", "down")}),
             min_size=1, max_size=8),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((0.0, 0.1, 0.25, 1.0)),
)  # fmt: skip
def test_every_weight_fits_its_slots_in_whole_blocks(
    layers: list[dict[str, str]], width: int, most_padding: float
) -> None:
    rows = [row for i, types in enumerate(layers) for row in experts(i, types, 512, 256 * width)]
    layout = slot_layout(rows, 8, 2, most_padding)
    by_name = {row.name: row for row in rows}
    assert layout.places().keys() == by_name.keys()
    for group in layout.groups:
        pool = layout.pools[group.pool]
        strides = {kind.name: kind.stride_bytes for kind in pool.kinds}
        for kind, name in group.names.items():
            row = by_name[name]
            block = GGML_QUANT_SIZES[GGMLQuantizationType[row.type.upper()]][1]
            assert group.matrix_bytes[kind] == row.size_bytes // 8 <= strides[kind]
            assert strides[kind] % block == 0
    for index, pool in enumerate(layout.pools):
        used = [sum(group.matrix_bytes.values()) for group in layout.groups if group.pool == index]
        assert pool.n_groups == len(used)
        assert sum(used) >= (1 - most_padding) * len(used) * pool.slot_bytes - 1e-6 or len(
            {tuple(sorted(layers[g.layer].items())) for g in layout.groups if g.pool == index}
        ) == 1  # fmt: skip
