"""Plans reserve what libllama allocates for a context, for the published shapes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from library_memory import Allocated, allocated

from lab.synth import plan_preset, write_header_only
from lab.synth.shape import PRESETS
from offload.model import ModelFacts, is_experts
from offload.model_file import read_facts
from offload.times.context_memory import ContextOptions, context_memory

_MIB = 1 << 20
SPEC = ContextOptions(4096, device_checkpoints=False)


@functools.cache
def library_takes(path: Path, spec: ContextOptions) -> Allocated:
    """Bytes that libllama would allocate. Cached, because they are the same each time."""
    return allocated(path, spec)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headers")
    for preset in PRESETS:
        write_header_only(plan_preset(preset, size="full", vocab="none"), folder / preset)
    return folder


def check(path: Path, facts: ModelFacts, spec: ContextOptions) -> None:
    """Check that planned caches agree within 128 KiB, and buffers within 10 % or 16 MiB."""
    ours, theirs = context_memory(facts, spec), library_takes(path, spec)
    assert ours.kv_bytes == pytest.approx(theirs.kv_bytes, abs=_MIB // 8)
    assert ours.recurrent_bytes == pytest.approx(theirs.recurrent_bytes, abs=_MIB // 8)
    if facts.architecture == "minimax-m2":  # the allocator reuses more memory here
        assert theirs.compute_bytes < ours.compute_bytes < 1.3 * theirs.compute_bytes
    else:
        assert ours.compute_bytes == pytest.approx(theirs.compute_bytes, rel=0.1, abs=16 * _MIB)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_used_is_within_3_percent_or_200_megabytes(preset: str, headers: Path) -> None:
    """The error of the planned device memory is the error of the context's memory alone.

    Resident weights have the file's sizes, and slots take the remaining memory. The plan here has
    the smallest resident set, so that the relative error is largest.
    """
    facts = read_facts(headers / preset)
    resident_bytes = sum(
        place.entry.size_bytes
        for place in facts.weights.values()
        if not is_experts(place.entry) and not place.entry.name.startswith("token_embd")
    )
    for n_ctx, n_ubatch in ((4096, 512), (32768, 2048), (131072, 4096)):
        spec = replace(SPEC, n_ctx=n_ctx, n_ubatch=n_ubatch)
        ours, theirs = context_memory(facts, spec), library_takes(headers / preset, spec)
        used = resident_bytes + theirs.kv_bytes + theirs.recurrent_bytes + theirs.compute_bytes
        off = ours.kv_bytes + ours.recurrent_bytes + ours.compute_bytes + resident_bytes - used
        print(f"{preset} {n_ctx} {n_ubatch}: {off / 1e6:+.0f} MB of {used / 1e9:.1f} GB")
        assert abs(off) <= max(0.03 * used, 200e6)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("n_ctx", "n_ubatch"), [(16 << 10, 512), (128 << 10, 512), (1 << 20, 512)])
def test_caches_and_buffers_of_long_contexts(
    preset: str, n_ctx: int, n_ubatch: int, headers: Path
) -> None:
    """The margins are those of docs/models.md."""
    spec = replace(SPEC, n_ctx=n_ctx, n_ubatch=n_ubatch)
    facts = read_facts(headers / preset)
    ours, theirs = context_memory(facts, spec), library_takes(headers / preset, spec)
    assert ours.kv_bytes == pytest.approx(theirs.kv_bytes, abs=_MIB // 8)
    assert ours.recurrent_bytes == pytest.approx(theirs.recurrent_bytes, abs=_MIB // 8)
    most = 1.3 if facts.architecture == "minimax-m2" else 1.2
    assert ours.compute_bytes <= most * theirs.compute_bytes + 16 * _MIB
    assert ours.compute_bytes >= 0.8 * theirs.compute_bytes - 16 * _MIB


@pytest.mark.parametrize("n_ubatch", [2048, 4096])
def test_deepseek_v4s_indexer_scores_every_compressed_key(n_ubatch: int, headers: Path) -> None:
    spec = replace(SPEC, n_ctx=1 << 20, n_ubatch=n_ubatch)
    check(headers / "deepseek-v4-flash", read_facts(headers / "deepseek-v4-flash"), spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"type_k": "q8_0", "type_v": "q8_0"},
        {"type_k": "bf16", "type_v": "bf16"},
        {"n_sequences": 4},
        {"n_ubatch": 64},
        {"n_ubatch": 8192},
        {"swa_full": True},
        {"n_outputs": 512},
    ],
)
@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen3.5-35b-a3b", "gpt-oss-120b", "glm-5"])
def test_it_follows_the_options(preset: str, changes: dict[str, object], headers: Path) -> None:
    spec = replace(SPEC, n_ctx=16384, **changes)  # type: ignore[arg-type]
    check(headers / preset, read_facts(headers / preset), spec)


@pytest.mark.parametrize("preset", ["deepseek-v3", "mistral-large", "qwen3-30b-a3b"])
def test_attention_scores_are_counted_without_flash_attention_alone(
    preset: str, headers: Path
) -> None:
    facts = read_facts(headers / preset)
    spec = replace(SPEC, n_ctx=16384, flash_attn="off")
    check(headers / preset, facts, spec)
    with_it = context_memory(facts, replace(spec, flash_attn="auto")).compute_bytes
    assert context_memory(facts, spec).compute_bytes > 5 * with_it


@pytest.mark.parametrize("preset", PRESETS)
def test_caches_of_separate_sequences(preset: str, headers: Path) -> None:
    """The library reserves buffers for a ubatch of all sequences. One of one may take more."""
    spec = replace(SPEC, n_ctx=30_000, n_sequences=4, kv_unified=False)
    path, facts = headers / preset, read_facts(headers / preset)
    if preset != "minimax-m3":
        check(path, facts, spec)
        return
    ours, theirs = context_memory(facts, spec), library_takes(path, spec)
    alone = library_takes(path, replace(SPEC, n_ctx=7680))
    assert ours.kv_bytes == theirs.kv_bytes == 4 * alone.kv_bytes
    assert theirs.compute_bytes < ours.compute_bytes
    assert ours.compute_bytes == pytest.approx(alone.compute_bytes, rel=0.1)
