"""Shapes of random models: presets, overrides, checks, types and values, without the library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from lab.synth.library import WantedTensor
from lab.synth.shape import (
    PRESETS,
    SIZES,
    TINY_VOCAB,
    ImpossibleShape,
    UnknownPreset,
    find_preset,
    parse_setting,
    read_description,
    resolve,
)
from lab.synth.tensors import MIXTURES, fill_of, types_of
from lab.synth.vocabulary import byte_level, size_of
from offload.errors import BadRequest


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("size", ["tiny", "full"])
def test_every_preset_resolves_at_every_size(name: str, size: str) -> None:
    shape = resolve(name, size)
    assert shape.number("block_count") >= 3
    assert shape.n_vocab == (TINY_VOCAB if size == "tiny" else PRESETS[name].n_vocab)
    if "expert_count" in shape.metadata:
        assert shape.number("expert_count") >= 8


def test_an_alias_is_its_preset() -> None:
    for preset in PRESETS.values():
        assert all(find_preset(alias) is preset for alias in preset.aliases)


def test_a_misspelt_preset_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UnknownPreset, match=r"'deepsek-v3'; did you mean deepseek-v3"):
        resolve("deepsek-v3", "tiny")
    with pytest.raises(UnknownPreset, match="--list"):
        resolve("zzzzzzzzzz", "tiny")


def test_overrides_replace_single_numbers() -> None:
    shape = resolve("deepseek-v3", "tiny", n_layer=40, n_expert=32, n_ctx=256, quant="q4_0")
    assert shape.number("block_count") == 40
    assert shape.number("expert_count") == 32
    assert shape.number("context_length") == 256
    assert shape.quant == "q4_0"


def test_raw_metadata_may_carry_the_architecture_or_not() -> None:
    for key in ("rope.freq_base", "deepseek2.rope.freq_base"):
        shape = resolve("deepseek-v3", "tiny", metadata={key: 5.0})
        assert shape.metadata["rope.freq_base"] == 5.0
        assert shape.unchecked


def test_square_attention_follows_the_width() -> None:
    shape = resolve("qwen2.5-72b", "tiny", n_embd=256)
    assert shape.number("attention.head_count") == 8


@given(
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from(["tiny", "full"]),
    st.floats(0.05, 2.0),
)
def test_a_scaled_shape_keeps_depth_experts_and_head_size(
    name: str, size: str, scale: float
) -> None:
    shape, scaled = resolve(name, size), resolve(name, size, scale=scale)
    for key in ("block_count", "expert_count", "attention.key_length", "attention.head_count_kv"):
        assert scaled.number(key) == shape.number(key)
    # The width is rounded up to whole heads, at least one for each key-value head.
    heads = shape.number("attention.key_length") * shape.number("attention.head_count_kv")
    limit = shape.number("embedding_length") * scale + max(512, heads)
    assert scaled.number("embedding_length") <= limit
    assert scaled.number("attention.head_count") % scaled.number("attention.head_count_kv") == 0


@pytest.mark.parametrize(
    ("preset", "overrides", "says"),
    [
        ("deepseek-v3", {"n_layer": 1}, "no expert layer"),
        ("deepseek-v3", {"n_layer": 0}, "block_count is 0"),
        ("deepseek-v3", {"n_layer": 513}, "512"),
        ("deepseek-v3", {"n_expert": 2}, "4 of 2 experts"),
        ("deepseek-v3", {"n_expert": 18}, "groups"),
        ("kimi-k2", {"n_expert": 2000}, "1024"),
        ("deepseek-v3", {"n_embd": 100}, "multiple of 32"),
        ("deepseek-v3", {"n_vocab": 0}, "vocabulary of 0"),
        ("deepseek-v3", {"scale": -1.0}, "scale of -1"),
        ("deepseek-v3", {"metadata": {"attention.key_length_mla": 32}}, "must exceed"),
        ("mistral-large", {"n_head": 3}, "evenly"),
        ("mistral-large", {"n_expert": 8}, "dense model"),
        ("command-a", {"n_head": 6}, "heads x head size"),
        ("qwen3next", {"n_layer": 3}, "no attention layer"),
        ("qwen3next", {"metadata": {"ssm.group_count": 3}}, "ssm.group_count 3"),
    ],
)
def test_an_impossible_size_is_refused_in_one_sentence(
    preset: str, overrides: dict[str, object], says: str
) -> None:
    with pytest.raises(ImpossibleShape, match=says) as caught:
        resolve(preset, "tiny", **overrides)
    assert "\n" not in str(caught.value)


def test_unknown_sizes_and_overrides_are_refused() -> None:
    with pytest.raises(BadRequest, match="one of tiny, tiny-vulkan, full"):
        resolve("deepseek-v3", "huge")
    with pytest.raises(BadRequest, match="'layers'"):
        resolve("deepseek-v3", "tiny", layers=3)
    with pytest.raises(BadRequest, match="deepseek2 presets"):
        resolve("qwen2", "tiny-vulkan")
    assert SIZES == ("tiny", "tiny-vulkan", "full")


def tensor(name: str, *shape: int) -> WantedTensor:
    return WantedTensor(name, shape)


def mixed(quant: str, *tensors: WantedTensor, n_layers: int = 16, tied: bool = False) -> list[Type]:
    return types_of(quant, tensors, n_layers, 1, tied=tied)


def test_each_class_gets_its_type() -> None:
    tensors = {
        tensor("blk.1.ffn_up_exps.weight", 256, 64, 8): Type.MXFP4,
        tensor("output.weight", 256, 512): Type.Q6_K,
        tensor("blk.0.attn_q.weight", 256, 512): Type.F16,
        tensor("blk.0.ffn_up.weight", 256, 512): Type.Q4_K,
        tensor("blk.0.attn_k_b.weight", 48, 512, 4): Type.F16,  # fills no block
    }
    for name in ("blk.0.ffn_gate_inp.weight", "blk.0.ssm_conv1d.weight", "blk.0.ffn_up_exps.bias"):
        tensors[tensor(name, 256, 256)] = Type.F32
    types = mixed("q4_K, experts=mxfp4,output=q6_K,attention=f16", *tensors)
    assert types == list(tensors.values())
    assert mixed("q4_K", tensor("blk.0.attn_k_b.weight", 128, 512, 4)) == [Type.Q8_0]


@pytest.mark.parametrize("text", ["q9_9", "experts=", "wheels=q8_0", "iq1_s"])
def test_unknown_types_and_classes_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match=r"known are|classes are"):
        mixed(text)


def test_q4_k_m_follows_the_layer() -> None:
    down = [tensor(f"blk.{i}.ffn_down_exps.weight", 256, 64, 8) for i in range(16)]
    more = {i for i, kind in enumerate(mixed("q4_k_m", *down)) if kind == Type.Q6_K}
    assert more == {0, 1, 4, 7, 10, 13, 14, 15}
    assert mixed("Q4_K_M", tensor("blk.0.ffn_up_exps.weight", 256, 64, 8)) == [Type.Q4_K]


def test_the_output_matrix_gets_more_bits_also_where_it_is_the_embedding() -> None:
    embedding = tensor("token_embd.weight", 256, 512)
    assert mixed("Q4_K_M", tensor("output.weight", 256, 512), embedding) == [Type.Q6_K, Type.Q4_K]
    assert mixed("Q4_K_M", embedding, tied=True) == [Type.Q6_K]


@pytest.mark.parametrize("quant", MIXTURES)
def test_a_mixture_falls_back_for_rows_that_fill_no_block(quant: str) -> None:
    names = ("attn_k_b", "ffn_down_exps", "ffn_up", "attn_output")
    for row, least in ((128, {Type.Q4_0, Type.Q5_0, Type.Q5_1, Type.Q8_0}), (48, {Type.F16})):
        tensors = [tensor(f"blk.0.{name}.weight", row, 512, 4) for name in names]
        assert set(mixed(quant, *tensors)) <= least
    assert mixed(quant, tensor("blk.0.attn_norm.weight", 256)) == [Type.F32]


def test_what_llama_cpp_never_quantises_is_left() -> None:
    assert mixed("Q4_K_M", tensor("blk.3.laurel_l.weight", 2048, 64)) == [Type.F16]


def test_values_suit_what_the_tensor_does() -> None:
    shape = resolve("deepseek-v3", "tiny")
    assert fill_of(tensor("blk.0.attn_norm.weight", 128), shape, False).kind == "constant"
    assert fill_of(tensor("rope_freqs.weight", 16), shape, False).scale > 0
    assert fill_of(tensor("blk.0.ssm_a", 4), shape, False).kind == "decay"
    matrix = fill_of(tensor("blk.0.ffn_up.weight", 256, 512), shape, False)
    assert matrix.scale == pytest.approx(1 / 16)


def test_a_tied_embedding_has_the_scale_of_an_output_matrix() -> None:
    shape = resolve("gemma2", "tiny")
    embedding = tensor("token_embd.weight", 256, 512)
    assert fill_of(embedding, shape, True) == fill_of(tensor("output.weight", 256, 2), shape, False)
    assert fill_of(embedding, shape, False).scale == 1.0


def test_the_byte_vocabulary_has_every_byte_and_only_mergeable_merges() -> None:
    entries = {e.key: e.value for e in byte_level(TINY_VOCAB)}
    tokens = entries["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == TINY_VOCAB
    assert sum(len(t) == 1 for t in tokens) == 256
    for merge in entries["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= set(tokens)
    assert size_of(byte_level(1000)) == 1000


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(ImpossibleShape, match="100 tokens are fewer"):
        byte_level(100)


def test_a_description_is_read_from_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    described = {"architecture": "olmoe", "metadata": {"olmoe.block_count": 3, "list": [1, 2]}}
    path.write_text(json.dumps(described))
    shape = read_description(path)
    assert (shape.name, shape.architecture, shape.unchecked) == ("mine", "olmoe", True)
    assert shape.metadata == {"block_count": 3, "list": (1, 2)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"architecture": "llama"}',
        '{"metadata": {}}',
        '{"architecture": "llama", "metadata": {}, "size": 3}',
        '{"architecture": "llama", "metadata": {"a": null}}',
        '{"architecture": "llama", "metadata": {"a": [1, "b"]}}',
        '{"architecture": "llama", "metadata": {}, "without": "x"}',
        '{"architecture": "llama", "metadata": {}, "without": ["("]}',
    ],
)
def test_a_bad_description_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BadRequest):
        read_description(path)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("a.b=3", ("a.b", 3)), ("a=0.5", ("a", 0.5)), ("a=yarn", ("a", "yarn"))],
)
def test_a_setting_is_a_key_and_a_value(text: str, parsed: tuple[str, object]) -> None:
    assert parse_setting(text) == parsed


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(BadRequest, match="KEY=VALUE"):
        parse_setting("rope")
