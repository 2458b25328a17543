"""Fixtures of the GPU tests. Without a GPU that ggml finds, the tests are skipped with the
reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import standin_calls
from on_gpu import Logits, logits_of, options

from lab.synth import write_preset
from offload.device import DeviceChoice, devices
from offload.ggml.library.lib import library
from offload.stream import doorbell
from offload.stream.bell_use import BELLS


@pytest.fixture(scope="session")
def gpu() -> DeviceChoice:
    """The first GPU. Without one the test is skipped, or fails if GPU_TESTS=required."""
    found = [device for device in devices() if device.on_gpu]
    if found:
        return found[0]
    reason = "ggml finds no GPU: the installed build has no GPU backend, or there is no driver"
    if os.environ.get("GPU_TESTS") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def no_misuse() -> Iterator[None]:
    """Check on the stand-in for CUDA that no call is refused and a GPU could compute every
    graph."""
    yield
    if standin_calls.is_loaded():
        found = standin_calls.counters()
        standin_calls.reset()
        names = ("errors", "bad_addresses", "stale_uids", "bad_ids")
        assert {name: found[name] for name in names} == dict.fromkeys(names, 0)


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let measured times of decodes not choose whether split layers wait, as they differ here."""
    monkeypatch.setattr(doorbell, "FIRST_TRIAL", 1 << 30)


@pytest.fixture(autouse=True)
def bells_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test use doorbells, although they failed in an earlier one."""
    monkeypatch.setattr(BELLS, "why_not", "")
    if "value_waits" in os.environ.get("STANDIN_IGNORE", ""):  # which the trial would notice
        monkeypatch.setattr(doorbell.DriverStream, "try_words", lambda *_: None)


@pytest.fixture(autouse=True)
def stale_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep buffers until the test ends, on Mesa's software driver.

    ggml updates only those entries of a descriptor set that a kernel reads. Mesa 22 counts the
    references of all entries, also of buffers that were freed, and then writes to freed memory.
    """
    if not any("llvmpipe" in device.description for device in devices()):
        yield
        return
    lib, closed = library(), list[int]()
    free = lib.ggml_backend_buffer_free
    monkeypatch.setattr(lib, "ggml_backend_buffer_free", closed.append)
    yield
    for address in closed:
        free(address)


@pytest.fixture(scope="session")
def async_gpu(gpu: DeviceChoice) -> DeviceChoice:
    """A GPU whose copies run on a stream of their own, ordered by events."""
    if not gpu.device.has_async_and_events:
        pytest.skip(f"{gpu.name} has no asynchronous copies or no events")
    return gpu


@pytest.fixture(scope="session")
def moe(models: Path) -> Path:
    """A DeepSeek-V3 shape small enough for a Vulkan driver in software."""
    return write_preset("deepseek-v3", models / "gpu_moe.gguf", size="tiny-vulkan", seed=1)


@pytest.fixture(scope="session")
def dense(models: Path) -> Path:
    return write_preset("mistral-large", models / "gpu_dense.gguf", size="tiny", seed=2)


@pytest.fixture(scope="session")
def resident_moe(gpu: DeviceChoice, moe: Path) -> Logits:
    """The logits of plain libllama with the whole model in device memory."""
    return logits_of(moe, options(gpu, wrapped=False))


@pytest.fixture(scope="session")
def resident_dense(gpu: DeviceChoice, dense: Path) -> Logits:
    return logits_of(dense, options(gpu, wrapped=False))
