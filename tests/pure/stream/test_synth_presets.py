"""Shapes of random models: presets, overrides, checks, types and values, without the library."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from lab.synth.shape import (
    PRESETS,
    TINY_VOCAB,
    ImpossibleShape,
    UnknownPreset,
    parse_setting,
    read_description,
    resolve,
)
from lab.synth.tensors import MIXTURES, types_of
from lab.synth.vocabulary import byte_level, size_of
from offload.errors import BadRequest
from offload.ggml.wanted import WantedTensor


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("size", ["tiny", "full"])
def test_every_preset_resolves_at_every_size(name: str, size: str) -> None:
    shape = resolve(name, size)
    assert shape.number("block_count") >= 3
    assert shape.n_vocab == (TINY_VOCAB if size == "tiny" else PRESETS[name].n_vocab)
    if "expert_count" in shape.metadata:
        assert shape.number("expert_count") >= 8


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


@pytest.mark.parametrize(
    ("preset", "overrides", "says"),
    [
        ("deepseek-v3", {"n_layer": 0}, "block_count is 0"),
        ("deepseek-v3", {"n_layer": 1}, "no expert layer"),
        ("mistral-large", {"n_head": 3}, "evenly"),
        ("command-a", {"n_head": 6}, "heads x head size"),
        ("qwen3next", {"n_layer": 3}, "no attention layer"),
        ("deepseek-v3", {"n_embd": 100}, "multiple of 32"),
        ("deepseek-v3", {"n_vocab": 0}, "vocabulary of 0"),
        ("deepseek-v3", {"scale": -1.0}, "scale of -1"),
        ("mistral-large", {"n_expert": 8}, "dense model"),
    ],
)
def test_an_impossible_size_is_refused_in_one_sentence(
    preset: str, overrides: dict[str, object], says: str
) -> None:
    with pytest.raises(ImpossibleShape, match=says) as caught:
        resolve(preset, "tiny", **overrides)
    assert "\n" not in str(caught.value)


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
        tensor("blk.0.attn_k_b.weight", 48, 512, 4): Type.F16,  # rows are not whole blocks
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


@pytest.mark.parametrize("quant", MIXTURES)
def test_a_mixture_falls_back_for_rows_that_fill_no_block(quant: str) -> None:
    names = ("attn_k_b", "ffn_down_exps", "ffn_up", "attn_output")
    for row, least in ((128, {Type.Q4_0, Type.Q5_0, Type.Q5_1, Type.Q8_0}), (48, {Type.F16})):
        tensors = [tensor(f"blk.0.{name}.weight", row, 512, 4) for name in names]
        assert set(mixed(quant, *tensors)) <= least
    assert mixed(quant, tensor("blk.0.attn_norm.weight", 256)) == [Type.F32]


def test_the_byte_vocabulary_has_every_byte_and_only_mergeable_merges() -> None:
    entries = {e.key: e.value for e in byte_level(TINY_VOCAB)}
    tokens = entries["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == TINY_VOCAB
    assert sum(len(t) == 1 for t in tokens) == 256
    for merge in entries["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= set(tokens)
    assert size_of(byte_level(1000)) == 1000


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
