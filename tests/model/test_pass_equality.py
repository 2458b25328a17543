"""Layers in passes, with and without a part for the CPU, give the resident model's bits.

The mixture, the sizes of batches and the number of slots are drawn: batches of 1 to 2,048 tokens,
and slots from room for two groups of experts to all. Further tests hold the same on two devices, on
a worker, with experts from the disk, and for the drafts of a model's own layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budgets import ON_GPU, budget, budget_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from splits import SPLITTERS
from wide import examples

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from lab.synth.mixtures import ARCHITECTURES, write_mixture
from offload.engine import Engine, EngineOptions, open_engine
from offload.model import is_experts
from offload.model_file import read_facts
from offload.plan.long_prompts import LONG_UBATCHES
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.ranges import by_shares
from offload.schedule.slots import StreamCounters
from offload.times.min_batch import NEVER, MinBatch

Rows = NDArray[np.float32]
MOST_TOKENS = 2048  # most tokens of a case's batches together
PROMPTS = (100, 3, 1, 300)  # tokens of each batch; with ubatches of 128 the last one has three


def options(streaming: Streaming, n_ubatch: int, **changes: Any) -> EngineOptions:
    settings_of: dict[str, Any] = {
        "device": "sim", "min_batch": MinBatch(1, 1), "n_ctx": MOST_TOKENS + 64,
        "n_batch": MOST_TOKENS, "n_outputs": MOST_TOKENS, "n_threads": 1, "n_threads_batch": 1,
    }  # fmt: skip
    return engine_options(
        streaming=streaming, n_ubatch=n_ubatch, most_ubatch=n_ubatch, **{**settings_of, **changes}
    )


def logits(engine: Engine, batches: Sequence[int]) -> Rows:
    rows = [
        engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        for n in batches
    ]
    return np.concatenate(rows)


@cache
def vram_bounds(path: Path) -> tuple[int, int]:
    """Device memory for the slots of one token's experts, and for all experts."""
    whole = make_plan(read_facts(path), PlanRequest(n_gpu_layers=ON_GPU))
    least = budget(path, Streaming(n_gpu_layers=ON_GPU), "least")
    return least, whole.resident_bytes + whole.slot_bytes


def slots_for(path: Path, share: float, **changes: Any) -> Streaming:
    """Options with the fewest slots, and with `share` of the room that all others take."""
    least, most = vram_bounds(path)
    vram_bytes = least + round(share * (most - least))
    return Streaming(vram_bytes=vram_bytes, n_gpu_layers=ON_GPU, passes="on", **changes)


def in_passes(path: Path, share: float, n_ubatch: int, **changes: Any) -> EngineOptions:
    return options(slots_for(path, share), n_ubatch, **changes)


def shared(path: Path, share: float, n_ubatch: int, split: str, **changes: Any) -> EngineOptions:
    """Options with which device and CPU share the layers of prompts."""
    streaming = slots_for(path, share, hybrid=True, splitter=SPLITTERS[split]())
    return options(streaming, n_ubatch, min_batch=MinBatch(NEVER, NEVER), **changes)


def computed(
    path: Path, opened: EngineOptions, batches: Sequence[int]
) -> tuple[Rows, StreamCounters]:
    with open_engine(path, opened) as engine:
        return logits(engine, batches), engine.counters()


def resident(path: Path, batches: Sequence[int], n_ubatch: int) -> Rows:
    opened = options(Streaming(), n_ubatch, stream_experts=False)
    return computed(path, opened, batches)[0]


# -- one device ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    architecture: str
    batches: tuple[int, ...]
    n_ubatch: int
    share: float  # of the slots beyond the fewest
    split: str


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = st.one_of(st.integers(1, 64), st.integers(65, 300), st.integers(301, MOST_TOKENS))
    batches, room = [], MOST_TOKENS
    for n in draw(st.lists(size, min_size=1, max_size=3)):
        batches.append(min(n, room))
        room -= batches[-1]
        if not room:
            break
    return Case(
        draw(st.sampled_from(ARCHITECTURES)),
        tuple(batches),
        draw(st.sampled_from([128, 512, MOST_TOKENS])),
        draw(st.one_of(st.just(0.0), st.floats(0.0, 0.5), st.just(1.0))),
        draw(st.sampled_from([*SPLITTERS])),
    )


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixtures")


def mixture(architecture: str, folder: Path) -> Path:
    path = folder / f"{architecture}-f32.gguf"
    return path if path.exists() else write_mixture(architecture, path, quant="f32")


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_a_drawn_case_has_the_resident_models_bits(mixtures: Path, case: Case) -> None:
    path = mixture(case.architecture, mixtures)
    expected = resident(path, case.batches, case.n_ubatch)
    for opened in (
        in_passes(path, case.share, case.n_ubatch),
        shared(path, case.share, case.n_ubatch, case.split),
    ):
        found, counters = computed(path, opened, case.batches)
        assert np.array_equal(found, expected)
        if case.share == 0.0 and max(case.batches) > 64:
            assert counters.passes + counters.n_pairs_host > 0


def test_the_largest_ubatch_of_plans_has_the_resident_models_bits(tmp_path: Path) -> None:
    n = LONG_UBATCHES[-1]
    path = write_preset(
        "qwen3moe", tmp_path / "one-layer.gguf", seed=1, quant="f32", n_layer=1, n_head=1,
        n_head_kv=1, n_ctx=2 * n,
    )  # fmt: skip
    changes = {
        "n_ctx": n + 256, "n_batch": n, "n_outputs": 64, "flash_attn": "on", "tuned_ubatch": n,
    }  # fmt: skip
    rows, sizes = [], []
    for opened in (
        options(Streaming(), n, stream_experts=False, **changes),
        in_passes(path, 0.0, n, **changes),
    ):
        with open_engine(path, opened) as engine:
            sizes.append(engine.layout.context.n_ubatch)
            tokens = [(13 * i * i + 5) % engine.n_vocab for i in range(n + 100)]
            rows.append(engine.sequences.extend(0, tokens, n_logits=8))
            counters = engine.counters()
    assert np.array_equal(*rows)
    assert counters.passes > 0
    assert sizes[-1] == n


# With k-quants, some pairs of a layer differ in the last bits (1.4e-6 of logits whose deviation is
# 3) if slots are padded. A later router may then choose another expert in a near-tie.
NEAR, FEW = 1e-5, 0.05  # difference in deviations of the logits; share of rows that may exceed it
TYPES = ("f16", "bf16", "q8_0", "q4_0", "q5_1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_xs",
         "mxfp4", "Q4_K_M")  # fmt: skip


@pytest.mark.parametrize("preset", ["qwen3moe", "deepseek-v3", "gpt-oss-20b"])
@pytest.mark.parametrize("quant", TYPES)
def test_experts_of_every_type_have_the_resident_models_logits(
    preset: str, quant: str, tmp_path: Path
) -> None:
    wide = {"n_embd": 256, "n_ff_exp": 256}  # blocks of k-quants have 256 weights
    path = write_preset(preset, tmp_path / "tiny.gguf", seed=3, quant=quant, **wide)
    expected = resident(path, PROMPTS, 512)
    for opened in (in_passes(path, 0.0, 512), shared(path, 0.2, 512, "random")):
        found, counters = computed(path, opened, PROMPTS)
        differing = np.abs(found - expected).max(axis=1) > NEAR * expected.std()
        assert np.mean(differing) <= FEW
        assert counters.passes > 0


# -- several devices, workers, the disk ------------------------------------------------------------


def two_devices(path: Path) -> str:
    """Return `--device` for two simulated devices with the fewest slots for half of the layers."""
    facts, streaming = read_facts(path), Streaming(n_gpu_layers=ON_GPU)
    parts = [facts.part(layers.first, layers.end) for layers in by_shares(facts.n_layers, (1, 1))]
    least = [budget_of(part, streaming, "least") for part in parts]
    return ",".join(f"sim:vram={-(-vram // 1024)}KiB" for vram in least)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_passes_on_two_devices_have_the_resident_models_bits(
    architecture: str, tmp_path: Path
) -> None:
    """Both devices compute ubatches of a prompt at the same time, and neither shares with a CPU."""
    path = mixture(architecture, tmp_path)
    expected = resident(path, PROMPTS, 128)
    device = two_devices(path)
    for opened in (in_passes(path, 0.0, 128), shared(path, 0.0, 128, "random")):
        opened = engine_options(
            opened, device=device, vram_bytes=None, tensor_split=(1, 1),
            min_batch=MinBatch(1, 1),
        )  # fmt: skip
        with open_engine(path, opened) as engine:
            assert np.array_equal(logits(engine, PROMPTS), expected)
            passes = [counters.passes > 0 for counters in engine.counters_by_device().values()]
            streams = [
                any(map(is_experts, part.plan.streamed)) for part in engine.opened.weights.parts
            ]
        assert passes == streams  # some architectures have experts in every other layer alone
        assert any(passes)
