"""The torch draft's memory layout and rotary embedding, computed without torch and a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BadModel, DeviceUnavailable
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.torch_draft.plan import (
    DraftShape,
    Rope,
    TorchDraftOptions,
    bucket,
    chunk_length,
    fed_length,
    lay_out,
    read_shape,
    weight_pieces,
)
from specoffload.opening.draft import check_device, torch_name


def shape_of(**changes: object) -> DraftShape:
    """The shape of Qwen2.5-0.5B, with changes."""
    plain = DraftShape(
        architecture="qwen2",
        n_layers=24,
        n_embd=896,
        n_ff=4864,
        n_head=14,
        n_head_kv=2,
        head_size=64,
        n_vocab=151936,
        n_ctx_train=32768,
        norm_eps=1e-6,
        attention_scale=0.125,
        rope=Rope(64, 1e6, True),
        tied=True,
        qkv_bias=True,
        qk_norm=False,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


REAL = {
    "qwen2.5-0.5b": shape_of(),
    "qwen3-0.6b": shape_of(
        n_layers=28, n_embd=1024, n_ff=3072, n_head=16, n_head_kv=8, head_size=128,
        rope=Rope(128, 1e6, True), qkv_bias=False, qk_norm=True,
    ),
    "llama-3.2-1b": shape_of(
        n_layers=16, n_embd=2048, n_ff=8192, n_head=32, n_head_kv=8, n_vocab=128256,
        qkv_bias=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("n_ctx", [4096, 32768])
@pytest.mark.parametrize("samples", [False, True])
def test_all_of_it_is_at_most_15_percent_above_weights_and_cache(
    name: str, n_ctx: int, samples: bool
) -> None:
    layout = lay_out(REAL[name], TorchDraftOptions(n_ctx=n_ctx, samples=samples))
    assert layout.total_bytes <= 1.15 * (layout.weight_bytes + layout.kv_bytes)


def test_the_weights_of_half_a_billion_parameters_take_two_bytes_each() -> None:
    layout = lay_out(REAL["qwen2.5-0.5b"], TorchDraftOptions(n_ctx=4096))
    assert layout.weight_bytes == pytest.approx(2 * 494.0e6, rel=0.01)
    assert layout.kv_bytes == 4097 * 24 * 2 * 2 * 64 * 2


@given(st.integers(1, 40000), st.integers(256, 32768))
def test_a_bucket_holds_the_positions_and_never_exceeds_the_context(n: int, n_ctx: int) -> None:
    size = bucket(n, n_ctx)
    assert size <= n_ctx
    assert size >= min(n, n_ctx)
    assert size == n_ctx or size < 2 * max(n, 256)


def test_steps_are_as_wide_as_few_sizes_allow() -> None:
    assert [fed_length(n) for n in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]


@given(st.sampled_from(sorted(REAL)), st.integers(256, 131072), st.integers(1 << 22, 1 << 30))
def test_chunks_shrink_with_depth(name: str, n_kv: int, scratch: int) -> None:
    chunk = chunk_length(REAL[name], n_kv, scratch)
    assert 16 <= chunk <= 512
    assert chunk_length(REAL[name], 2 * n_kv, scratch) <= chunk


# -- rotation -------------------------------------------------------------------------------------


def test_the_two_orders_pair_what_llama_cpp_pairs() -> None:
    assert Rope(6, 1e4, False).order().tolist() == [0, 1, 2, 3, 4, 5]
    assert Rope(6, 1e4, True).order().tolist() == [0, 3, 1, 4, 2, 5]


def test_yarn_leaves_fast_pairs_and_slows_the_slowest() -> None:
    plain = Rope(64, 1e6, True).turns(2)[1]
    scaled = Rope(64, 1e6, True, kind="yarn", factor=4.0, n_ctx_original=32768).turns(2)[1]
    assert np.angle(scaled[0]) == pytest.approx(np.angle(plain[0]))
    assert np.angle(scaled[-1]) == pytest.approx(np.angle(plain[-1]) / 4)
    assert abs(scaled[0]) == pytest.approx(1 + 0.1 * np.log(4.0))


# -- files ----------------------------------------------------------------------------------------


def facts_of(shape: DraftShape, **metadata: object) -> ModelFacts:
    """A header from which the given shape can be read back."""
    a = shape.architecture
    values = {
        "block_count": shape.n_layers,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": shape.norm_eps,
        "context_length": shape.n_ctx_train,
        "rope.freq_base": shape.rope.base,
        **metadata,
    }
    path = Path("draft.gguf")
    places = {
        source.name: WeightPlace(path, TensorEntry(source.name, "f16", source.shape, 0, 0))
        for piece in weight_pieces(shape, TorchDraftOptions())
        for source in piece.sources
    }
    header = Header({f"{a}.{k}": v for k, v in values.items()}, ())  # type: ignore[misc]
    return ModelFacts(path, a, "draft", header, places)


@pytest.mark.parametrize("name", REAL)
def test_a_shape_is_read_from_its_header(name: str) -> None:
    shape = REAL[name]
    read = read_shape(facts_of(shape))
    scale = 1 / np.sqrt(shape.head_size)
    rope = replace(shape.rope, n_ctx_original=shape.n_ctx_train)
    assert read == replace(shape, rope=rope, attention_scale=scale)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"expert_count": 8}, "not 8 experts"),
        ({"attention.value_length": 32}, "different sizes"),
        ({"attention.head_count": 0}, "no head count"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"rope.dimension_count": 32}, "32 rotated of 64"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1}, "log multiplier"),
        ({"feed_forward_length": 100}, r"tensor blk\.0\.ffn_gate\.weight is \(896, 4864\)"),
        ({"block_count": 25}, r"has no tensor blk\.24\.attn_norm\.weight"),
        ({"block_count": 23}, r"tensor blk\.23\.attn_norm\.weight has no place"),
    ],
)
def test_what_the_graph_does_not_know_is_refused(metadata: dict[str, object], words: str) -> None:
    with pytest.raises(BadModel, match=words):
        read_shape(facts_of(REAL["qwen2.5-0.5b"], **metadata))


# -- devices --------------------------------------------------------------------------------------


def fake_torch(version: str = "2.9.1+cu130", n_devices: int = 1) -> ModuleType:
    cuda = SimpleNamespace(is_available=lambda: n_devices > 0, device_count=lambda: n_devices)
    module = ModuleType("torch")
    module.__dict__.update(__version__=version, cuda=cuda, __spec__=SimpleNamespace())
    return module


@pytest.mark.parametrize(
    ("torch", "device", "words"),
    [
        (None, "CUDA0", r"not installed \(pip install 'specoffload\[gpu-draft\]'\)"),
        (fake_torch(), "Vulkan0", "torch has no device Vulkan0"),
        (fake_torch(n_devices=0), "CUDA0", "finds no CUDA device"),
        (fake_torch("2.7.1"), "CUDA0", "needs torch 2.8 on CUDA, this is 2.7.1"),
        (fake_torch(), "CUDA1", "torch has 1 CUDA devices, and no number 1"),
    ],
)
def test_why_there_is_no_torch_draft_is_one_sentence(
    torch: ModuleType | None, device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch is None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    else:
        monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(DeviceUnavailable, match=words):
        check_device(torch_name(device, on_gpu=True))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import ctypes; ctypes.CDLL('libcublas.so.99')", r"libcublas\.so\.99"),
        ("from math import no_such_symbol", "no_such_symbol"),
        ("raise ValueError('libcublas.so not found in the system path\\nmore')", "system path;"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_one_sentence(
    code: str, words: str, break_torch: Callable[[str], None]
) -> None:
    break_torch(code)
    for name in (torch_name("CUDA0", on_gpu=True), "cpu"):
        with pytest.raises(DeviceUnavailable, match=f"cannot be imported: .*{words}"):
            check_device(name)


def test_the_draft_is_where_the_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(n_devices=2))
    for ggml, name in (("CUDA1", "cuda:1"), ("ROCm0", "cuda:0")):
        assert torch_name(ggml, on_gpu=True) == name
        check_device(name)
    assert torch_name("CPU", on_gpu=False) == "cpu"
    check_device("cpu")
