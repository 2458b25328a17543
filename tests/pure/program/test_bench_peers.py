"""bench beside llama.cpp: how that is tuned, what is asked of it, what the numbers mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.model import Header, ModelFacts, TensorEntry, WeightPlace, is_experts, layer_of
from specoffload.bench.llama_server import (
    DRAFT_MAX,
    DRAFT_P_MIN,
    TunedLlama,
    known_names,
    program_of,
    summed,
    sweep,
    tune_for,
)
from specoffload.bench.load import Load
from specoffload.bench.paths import Measured
from specoffload.commands.bench import _rows, doubts, side_by_side
from specoffload.errors import UsageError
from specoffload.session.statistics import GenerationStats

N_LAYERS = 6
EXPERTS_BYTES = 3 * 4 * 64 * 64 * 8  # of one layer
OUTPUT_BYTES = 4 * 64 * 640


def model(*, experts: bool = True) -> ModelFacts:
    """Six layers of an attention weight and, where asked for, three matrices of experts."""
    names = {"output.weight": (64, 640), "token_embd.weight": (64, 640)}
    for layer in range(N_LAYERS):
        names[f"blk.{layer}.attn_q.weight"] = (64, 64)
        if experts:
            for kind in ("gate", "up", "down"):
                names[f"blk.{layer}.ffn_{kind}_exps.weight"] = (64, 64, 8)
    entries = [_entry(name, shape) for name, shape in names.items()]
    metadata = {"general.architecture": "x", "x.block_count": N_LAYERS,
                "x.expert_count": 8 if experts else 0, "x.expert_used_count": 2}  # fmt: skip
    weights = {e.name: WeightPlace(Path("m.gguf"), e) for e in entries}
    header = Header(metadata, tuple(entries))
    return ModelFacts(Path("m.gguf"), "x", "x", header, weights)


def _entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    size = 4
    for n in shape:
        size *= n
    return TensorEntry(name, "f32", shape, 0, size)


def on_device_bytes(facts: ModelFacts, tuned: TunedLlama) -> int:
    pattern = tuned.cpu_weights()
    return sum(
        place.entry.size_bytes
        for name, place in facts.weights.items()
        if not name.startswith("token_embd.") and not (pattern and re.search(pattern, name))
    )


@given(vram=st.integers(OUTPUT_BYTES + 1000, 2_000_000), reserve=st.integers(0, 1000),
       experts=st.booleans())  # fmt: skip
def test_an_owners_llama_cpp_fills_the_memory_and_never_exceeds_it(
    vram: int, reserve: int, experts: bool
) -> None:
    facts = model(experts=experts)
    tuned = tune_for(facts, vram_bytes=vram, reserve_bytes=reserve, n_ubatch=512)
    used = on_device_bytes(facts, tuned) + reserve
    assert used <= vram
    if tuned.n_dense_layers_on_cpu == 0 and tuned.n_cpu_moe:
        assert used + EXPERTS_BYTES > vram, "one more layer of experts would have fitted"
    if tuned.n_dense_layers_on_cpu and experts:
        assert tuned.n_cpu_moe == N_LAYERS, "experts go before attention does"


def test_without_a_gpu_nothing_is_moved() -> None:
    tuned = tune_for(model(), vram_bytes=None, reserve_bytes=0, n_ubatch=512)
    assert tuned.cpu_weights() == ""
    assert "-ngl" not in tuned.command_line("m.gguf")


def test_the_command_line_is_one_that_llama_server_takes() -> None:
    line = TunedLlama(3, 0, 4096, on_gpu=True).command_line("m.gguf")
    assert line == "llama-server -m m.gguf -ub 4096 -b 4096 -ngl 99 --n-cpu-moe 3 --no-mmap"


def test_the_pattern_takes_the_first_layers_experts_only() -> None:
    facts, pattern = model(), TunedLlama(2, 0, 512, on_gpu=True).cpu_weights()
    found = [n for n in facts.weights if re.search(pattern, n)]
    assert len(found) == 6
    assert {layer_of(n) for n in found} == {0, 1}
    assert all(is_experts(facts.weights[n].entry) for n in found)


def measured(tps: float, prefill_s: float) -> Measured:
    stats = GenerationStats(n_tokens=100, decode_s=100 / tps, n_rounds=100)
    return Measured((stats,), (prefill_s,))


def test_ratios_are_to_llama_cpp_at_its_best() -> None:
    found = {
        "llama.cpp -ub 512": measured(10, 4.0),
        "llama.cpp -ub 4096": measured(8, 1.0),
        "wrapped": measured(12, 0.5),
        "spec": measured(30, 0.5),
    }
    result = side_by_side(found, 1000)
    assert result["plain_tps"] == 10
    assert result["vs"]["llama.cpp -ub 512"] == 3
    assert result["vs"]["llama.cpp -ub 4096"] == 3.75
    assert result["vs"]["llama.cpp -ub 4096, prefill"] == 2
    assert result["prefill_tps"]["wrapped"] == 2000


def repeated(*decodes_s: float) -> Measured:
    written = tuple(GenerationStats(n_tokens=100, decode_s=s) for s in decodes_s)
    return Measured(written, (1.0,) * len(written))


def test_ratios_of_few_or_noisy_repetitions_are_marked() -> None:
    idle, busy = Load(0.05, 2), Load(0.4, 2)
    assert doubts({"wrapped": repeated(1.0, 1.1, 1.05)}, idle) == []
    (few,) = doubts({"wrapped": repeated(1.0)}, idle)
    assert "with 1 measured repetitions the spread" in few
    (disturbed,) = doubts({"wrapped": repeated(1.0, 1.0, 1.0)}, busy)
    assert "other programs took 40% of the 2 processors" in disturbed
    (spread,) = doubts({"wrapped": repeated(1.0, 1.0, 1.5)}, idle)
    assert "decoding by streamed varied by 50%" in spread
    result = side_by_side({"llama.cpp -ub 512": measured(10, 4.0), "wrapped": measured(15, 1)}, 9)
    assert [row[3] for row in _rows(result | {"unreliable": []})] == ["1.00", "1.50"]
    assert [row[3] for row in _rows(result | {"unreliable": ["why"]})] == ["1.00 ?", "1.50 ?"]


def test_a_path_that_was_left_out_is_no_number() -> None:
    result = side_by_side({"wrapped": measured(12, 0.5)}, 1000)
    assert result["vs"] == {}
    assert "plain_tps" not in result


def test_the_draft_flags_of_a_llama_server_are_swept() -> None:
    assert sweep(None) == [()]
    tried = sweep(Path("d.gguf"))
    assert tried[0] == ()
    assert len(tried) == 1 + len(DRAFT_MAX) * len(DRAFT_P_MIN) == len(set(tried))


def test_renamed_flags_are_used_where_the_help_has_them() -> None:
    flags = ["-md", "d.gguf", "--draft-max", "16"]
    assert known_names(flags, "... --draft-max N ...") == flags
    assert known_names(flags, "--spec-draft-n-max N") == [
        "-md",
        "d.gguf",
        "--spec-draft-n-max",
        "16",
    ]


def test_speeds_are_over_all_answers() -> None:
    timings = [
        {"prompt_n": 100, "prompt_ms": 50.0, "predicted_n": 10, "predicted_ms": 100.0},
        {"prompt_n": 100, "prompt_ms": 150.0, "predicted_n": 30, "predicted_ms": 100.0,
         "draft_n": 20, "draft_n_accepted": 5},
    ]  # fmt: skip
    speed = summed(("-md", "d"), timings)
    assert (speed.prefill_tps, speed.decode_tps, speed.acceptance_rate) == (1000, 200, 0.25)


@pytest.mark.parametrize("text", ["llama-server", "llama-server=", "vllm=/bin/true", "x"])
def test_another_peer_is_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="must be llama-server=PATH"):
        program_of(text)


def test_a_peer_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        program_of(f"llama-server={tmp_path / 'none'}")
