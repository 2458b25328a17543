"""--override-kv: llama.cpp's grammar, and headers in which values replace the file's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resolved import line_of

from offload.errors import BadModel
from offload.header_overrides import overriding
from offload.kv_overrides import KvOverride, override_flags, read_overrides, words_of
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from specoffload.errors import UsageError
from specoffload.report import plain

PATH = Path("m.gguf")
METADATA: dict[str, object] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 1,
    "qwen3moe.context_length": 512,
    "qwen3moe.embedding_length": 32,
    "qwen3moe.expert_count": 8,
    "qwen3moe.expert_used_count": 4,
    "qwen3moe.expert_weights_scale": 1.5,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3moe.expert_weights_norm": True,
    "tokenizer.ggml.pre": "gpt-2",
    "qwen3moe.rope.dimension_sections": (1, 0),
}


def facts() -> ModelFacts:
    entries = [
        TensorEntry("token_embd.weight", "f32", (32, 64), 0, 8192),
        TensorEntry("blk.0.ffn_up_exps.weight", "f32", (32, 64, 8), 8192, 65536),
    ]
    header = Header(METADATA, tuple(entries), {"qwen3moe.rope.dimension_sections": 2})  # type: ignore[arg-type]
    weights = {entry.name: WeightPlace(PATH, entry) for entry in entries}
    return ModelFacts(PATH, "qwen3moe", "m", header, weights)


def test_each_type_is_read_as_llama_cpp_reads_it() -> None:
    read = read_overrides("a.b=int:-7,c=float:1e-3,d=bool:false,e=str:x:y=z")
    assert read == (
        KvOverride("a.b", -7),
        KvOverride("c", 0.001),
        KvOverride("d", False),
        KvOverride("e", "x:y=z"),
    )
    assert [override.kind for override in read] == ["int", "float", "bool", "str"]
    assert read_overrides('"k=str:one, two",b=int:1') == (
        KvOverride("k", "one, two"),
        KvOverride("b", 1),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be KEY=TYPE:VALUE"),
        (",", "must be KEY=TYPE:VALUE"),
        ("a.b", "TYPE must be one of int, float, bool, str"),
        ("a.b=4", "TYPE must be one of int, float, bool, str"),
        ("=int:4", "TYPE must be one of int, float, bool, str"),
        ("a=uint:4", "TYPE must be one of int, float, bool, str"),
        ("a=int:4x", "must be a whole number of 64 bits"),
        ("a=int:", "must be a whole number of 64 bits"),
        (f"a=int:{1 << 63}", "must be a whole number of 64 bits"),
        ("a=float:inf", "must be a finite number"),
        ("a=float:four", "must be a finite number"),
        ("a=bool:1", "must be true or false"),
        (f"a=str:{'x' * 128}", "at most 127 bytes"),
        (f"{'k' * 128}=int:1", "at most 127 bytes"),
        (f"a=str:{'é' * 64}", "at most 127 bytes"),
        (f"{'é' * 64}=int:1", "at most 127 bytes"),
        ("a\0=int:1", "none zero"),
    ],
)
def test_a_wrong_text_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_overrides(text)
    with pytest.raises(UsageError, match=f"--override-kv.*{words}"):
        line_of("--override-kv", text)


def test_a_line_break_is_read_in_quotes_alone() -> None:
    assert read_overrides('"a=str:x\ny",b=int:1')[0] == KvOverride("a", "x\ny")
    with pytest.raises(ValueError, match="cannot be read .*put text in quotes"):
        read_overrides("a=str:x\ny")


values = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=20),
)
names = st.from_regex(r"[a-z][a-z0-9_.]{0,30}", fullmatch=True)


@given(st.lists(st.builds(KvOverride, names, values), min_size=1, max_size=4))
def test_words_are_read_back_as_the_same_overrides(overrides: list[KvOverride]) -> None:
    assert read_overrides(words_of(overrides)) == tuple(overrides)


def test_flags_add_up() -> None:
    line = line_of("--override-kv", "a=int:1,b=bool:true", "--override-kv", "c=float:2")
    assert [str(each) for each in line.options.kv_overrides] == [
        "a=int:1", "b=bool:true", "c=float:2.0",
    ]  # fmt: skip
    flags = override_flags(line.options.kv_overrides)
    assert line_of(*flags).options.kv_overrides == line.options.kv_overrides


def test_a_value_replaces_the_files() -> None:
    changed = overriding(facts(), read_overrides("qwen3moe.expert_used_count=int:2"))
    assert (facts().n_experts_used, changed.n_experts_used) == (4, 2)
    assert changed.overrides == (KvOverride("qwen3moe.expert_used_count", 2),)
    assert changed.weights == facts().weights


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("qwen3moe.expert_used_count=int:0", "is 0, and must be from 1 to the 8"),
        ("qwen3moe.expert_used_count=int:9", "is 9, and must be from 1 to the 8"),
        ("qwen3moe.expert_used_count=int:-1", "is -1, and must be from 0"),
        ("qwen3moe.expert_used_count=float:2", "is an int in this file.*=int:VALUE"),
        ("qwen3moe.expert_used_count=bool:true", "is an int in this file.*=int:VALUE"),
        ("qwen3moe.expert_weights_scale=int:2", "is a float in this file.*=float:VALUE"),
        ("qwen3moe.expert_weights_norm=int:1", "is a bool in this file.*=bool:VALUE"),
        ("tokenizer.ggml.pre=int:1", "is a str in this file.*=str:VALUE"),
        ("qwen3moe.expert_count=int:4", "is 4, and blk.0.ffn_up_exps.weight holds 8"),
        ("qwen3moe.block_count=int:0", "block_count is 0"),
        ("qwen3moe.embedding_length=int:64", "embedding_length is 64"),
        ("qwen3moe.attention.layer_norm_rms_epsilon=float:-1", "below 0"),
        ("qwen3moe.rope.dimension_sections=int:1", "is a list of 2 values"),
        (f"qwen3moe.context_length=int:{1 << 32}", "the library keeps only 32 bits of it"),
        (f"qwen3moe.not_in_the_file=int:{-(1 << 31) - 1}", "the library keeps only 32 bits of it"),
        ("qwen3moe.expert_weights_scale=float:1e39", "the library keeps only 32 bits of it"),
        ("general.architecture=str:llama", "by which the file itself is read"),
        ("split.count=int:3", "by which the file itself is read"),
        ("general.alignment=int:64", "by which the file itself is read"),
        ("tokenizer.ggml.model=str:llama", "by which the file itself is read"),
        ("qwen3moe.context_length=int:9,qwen3moe.context_length=int:8", "context_length twice"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(BadModel, match=words) as refused:
        overriding(facts(), read_overrides(text))
    sentence = str(refused.value)
    assert sentence.startswith("--override-kv qwen3moe." if "qwen3moe" in text else "--override-kv")
    assert "damaged" not in sentence, "the file is not at fault"
    assert "\n" not in plain(sentence)
