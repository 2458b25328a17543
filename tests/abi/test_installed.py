"""Names the GPUs that the installed library has code for, and judges this machine's cards."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_libraries import fatbin, library

from offload import device
from offload.device import DeviceChoice, choose_device, choose_devices, devices
from offload.errors import DeviceUnavailable
from offload.ggml import drivers, installed
from offload.ggml.drivers import Card, CudaDriver
from offload.ggml.gpu_code import Code
from offload.ggml.installed import built_for, cuda_unused, no_device_reason
from offload.ggml.native_build import missing_in_build

GTX_1080 = Card("GTX 1080", (6, 1))
RTX_4090 = Card("RTX 4090", (8, 9))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of libraries of a llama_cpp with code for an RTX 4090."""
    folder = tmp_path / "llama_cpp"
    monkeypatch.setattr(installed, "package_folder", lambda: folder)
    library(folder / "lib/libggml-cuda.so", fatbin([Code((8, 9))]))
    return folder / "lib"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a machine with an NVIDIA driver."""
    file = tmp_path / "root" / drivers.NVIDIA
    file.parent.mkdir(parents=True)
    file.touch()
    return tmp_path / "root"


def answers(monkeypatch: pytest.MonkeyPatch, driver: CudaDriver) -> None:
    monkeypatch.setattr(drivers, "_asked", lambda _: driver)


def test_the_backends_of_a_library_are_named(package: Path) -> None:
    assert built_for() == "CUDA 13, code for compute capability 8.9"
    (package / "libggml-vulkan.so").touch()
    assert built_for() == "CUDA 13, code for compute capability 8.9 and Vulkan"
    for file in package.iterdir():
        file.unlink()
    assert built_for() == "the CPU alone"
    (package / "libggml-hip.so.0").touch()
    assert built_for() == "ROCm"
    (package / "libggml-cuda.so").write_bytes(b"cut off")
    assert built_for() == "CUDA and ROCm"


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (CudaDriver((12, 4), (RTX_4090,)), "runs CUDA 12.4, and this library needs CUDA 13"),
        (CudaDriver((13, 0), (GTX_1080,)), "GTX 1080 (compute capability 6.1) is older"),
        (CudaDriver((13, 0), ()), "CUDA finds no card"),
    ],
)
def test_a_driver_that_the_library_does_not_use_says_why(
    driver: CudaDriver,
    words: str,
    package: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert package.exists()
    answers(monkeypatch, driver)
    (sentence,) = missing_in_build(root, has_gpu=False)
    assert words in sentence
    assert cuda_unused(root) == sentence
    assert missing_in_build(root, has_gpu=True) == ()


def test_without_a_driver_nothing_is_said(package: Path, tmp_path: Path) -> None:
    assert package.exists()
    assert cuda_unused(tmp_path) == ""
    assert no_device_reason("CUDA0", tmp_path) == ""


def test_a_card_without_code_is_refused_before_it_is_used(
    package: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml would end the process at the first kernel."""
    assert package.exists()
    answers(monkeypatch, CudaDriver((13, 0), (RTX_4090, GTX_1080)))
    monkeypatch.setattr(device, "no_device_reason", lambda name: no_device_reason(name, root))
    (cpu,) = devices()
    cards = [DeviceChoice(f"CUDA{n}", "a card", cpu.device, True, True, "") for n in range(2)]
    monkeypatch.setattr(device, "devices", lambda: [cpu, *cards])
    assert choose_device("auto").name == "CUDA0"
    for wanted, all_gpus in (("CUDA1", False), ("auto:1", False), ("auto", True)):
        with pytest.raises(DeviceUnavailable, match=r"CUDA1 cannot be used: GTX 1080 .*6\.1"):
            choose_devices(wanted, all_gpus=all_gpus)
    assert choose_device("cpu").name == "cpu"


def test_a_named_card_that_cuda_does_not_show_is_refused_with_the_reason(
    package: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert package.exists()
    answers(monkeypatch, CudaDriver((12, 4), (RTX_4090,)))
    monkeypatch.setattr(device, "cuda_unused", lambda: cuda_unused(root))
    with pytest.raises(DeviceUnavailable, match=r"device CUDA0: the NVIDIA driver runs CUDA 12\.4"):
        choose_device("CUDA0")
    with pytest.raises(DeviceUnavailable, match="did you mean"):
        choose_device("cpuu")
