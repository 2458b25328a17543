"""The stand-in's driver and card beside what the real ggml-cuda holds code for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload.device import DeviceChoice, devices
from offload.ggml.cuda_driver import most_batch_tokens
from offload.ggml.drivers import WSL_GPU, Card, CudaDriver
from offload.ggml.installed import cuda_code

ROOT = Path(__file__).parents[3]
# A root whose driver is the stand-in's, which is asked in a process of its own.
ASK = """
import sys
from pathlib import Path
from offload.ggml.drivers import nvidia_driver
from offload.ggml.installed import cuda_unused, no_device_reason
root = Path(sys.argv[1])
print(nvidia_driver(root))
print(no_device_reason("CUDA0", root))
print(cuda_unused(root))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    folder = root / "usr/lib/wsl/lib"
    folder.mkdir(parents=True)
    (root / WSL_GPU).parent.mkdir()
    (root / WSL_GPU).touch()
    preloaded = Path(os.environ["LD_PRELOAD"].split(":")[0])
    (folder / "libcuda.so.1").symlink_to(preloaded.with_name("libcuda.so.1"))
    return root


def asked(root: Path, **settings: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(root)], env={**os.environ, **settings},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


def test_the_card_that_the_library_has_code_for_is_taken(root: Path) -> None:
    code = cuda_code()
    assert code is not None
    assert code.cuda == 13
    machine_code = [c.compute for c in code.codes if c.ptx is None]
    assert machine_code
    major, minor = machine_code[-1]
    driver, reason, unused, _ = asked(root, STANDIN_COMPUTE=f"{major}{minor}")
    card = Card("stand-in H100", (major, minor))
    assert driver == str(CudaDriver((13, 0), (card,)))
    assert reason == ""
    assert "CUDA finds no card" in unused


def test_an_older_card_is_refused(root: Path) -> None:
    _, reason, unused, _ = asked(root, STANDIN_COMPUTE="61")
    assert "stand-in H100 (compute capability 6.1) is older" in reason
    assert unused == reason


def test_an_older_driver_shows_no_card_and_is_named(root: Path) -> None:
    _, reason, unused, _ = asked(root, STANDIN_DRIVER="12040")
    assert "the NVIDIA driver runs CUDA 12.4, and this library needs CUDA 13" in unused
    assert "driver 580.65 or newer" in unused
    assert reason == unused
    count = "from offload.device import has_gpu; print(has_gpu())"
    done = subprocess.run(
        [sys.executable, "-c", count], env={**os.environ, "STANDIN_DRIVER": "12040"},
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"


def test_a_batch_is_at_most_as_large_as_the_shared_memory_of_a_block(standin: DeviceChoice) -> None:
    assert most_batch_tokens(standin.device) == (227 << 10) // 4  # an H100's
    (cpu,) = [choice for choice in devices() if not choice.on_gpu and choice.sim is None]
    assert most_batch_tokens(cpu.device) is None
