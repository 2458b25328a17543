"""A GPU that shares the RAM with the CPU is chosen last, and nothing is copied to it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import resolved
from budgets import ON_GPU, budget

from lab.options import Streaming
from offload import device
from offload.device import DeviceChoice, choose_device, choose_devices
from offload.errors import DeviceUnavailable
from offload.ggml.backend import all_devices
from offload.times.min_batch import NEVER, MinBatch
from specoffload.config.options import PlanOptions, Toggle
from specoffload.config.resolution import Config, demo_file
from specoffload.config.speculation import NO_DRAFTS
from specoffload.generation.generation import GenerateOptions
from specoffload.opening.context_size import planned_with_context
from specoffload.session.session import Session


@dataclass(frozen=True)
class FakeDevice:
    """A device as ggml describes it."""

    name: str
    is_integrated: bool = False
    kind: str = "gpu"
    description: str = "a GPU"


INTEGRATED, CARD, SECOND = FakeDevice("Vulkan0", True), FakeDevice("Vulkan1"), FakeDevice("Vulkan2")


def found(monkeypatch: pytest.MonkeyPatch, *gpus: FakeDevice) -> None:
    """Let ggml know these GPUs and the CPU."""
    cpu = next(one for one in all_devices() if one.kind == "cpu")
    monkeypatch.setattr(device, "all_devices", lambda: [*gpus, cpu])
    monkeypatch.setattr(device, "no_device_reason", lambda name: "")


def test_a_card_is_chosen_before_a_gpu_that_shares_the_ram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found(monkeypatch, INTEGRATED, CARD)
    assert choose_device("auto").name == "Vulkan1"
    assert choose_device("auto:1").name == "Vulkan0"
    assert choose_device("Vulkan0").shares_ram
    assert not choose_device("Vulkan1").shares_ram
    found(monkeypatch, INTEGRATED)
    assert choose_device("auto").name == "Vulkan0"
    assert not choose_device("cpu").shares_ram


def test_a_gpu_that_shares_the_ram_is_never_one_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found(monkeypatch, INTEGRATED, CARD, SECOND)
    names = [choice.name for choice in choose_devices("auto", all_gpus=True)]
    assert names == ["Vulkan1", "Vulkan2"]
    with pytest.raises(DeviceUnavailable, match="Vulkan0 shares the RAM with the CPU"):
        choose_devices("Vulkan1,Vulkan0")


def config_of(**changes: object) -> Config:
    half = budget(demo_file("target.gguf"), Streaming(), "half")
    return resolved.config_of(
        **{
            "threads": 1, "ctx_size": 256, "device": "sim", "vram_bytes": half,
            "n_gpu_layers": ON_GPU, "n_cpu_moe": 99, "spec": NO_DRAFTS, "use_profile": False,
            **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_streams_to_a_device_that_shares_the_ram(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    flags: dict[str, object] = {"min_batch": "1", "hybrid": Toggle.ON} if asked else {}
    config = config_of(**flags)
    prompt, options = "def f(x):\n" * 20, GenerateOptions(n_predict=6, ignore_eos=True)
    with Session(config_of(min_batch="1")) as session:
        plain = [t for p in session.generate(prompt, options) for t in p.tokens]
        assert session.target.counters().streamed_bytes > 0
    monkeypatch.setattr(DeviceChoice, "shares_ram", True)
    with Session(config) as session:
        assert [t for p in session.generate(prompt, options) for t in p.tokens] == plain
        counters = session.target.counters()
        said = [note for note in session.notes if "shares the RAM with the CPU" in note]
    assert (counters.streamed_bytes, counters.split_layers) == (0, 0)
    assert any("the CPU computes the weights" in note for note in said)
    for flag in ("--min-batch", "--hybrid"):
        assert any(note.startswith(flag) and "ignored" in note for note in said) == asked
    planned = planned_with_context(config, PlanOptions())
    assert planned.layout.min_batch == MinBatch(NEVER, NEVER)
