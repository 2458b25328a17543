"""Greedy text of a streamed target with a draft is the CPU's text, whatever computes the draft."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENVIRONMENT = {**os.environ, "SPECOFFLOAD_WITHOUT": "profile"}
STREAMED = ("--n-cpu-moe", "99", "--min-batch", "1", "--ubatch-size", "64")


def text(*flags: str) -> str:
    command = [sys.executable, "-m", "specoffload", "run", "import os", "-n", "24", "--temp", "0"]
    command += ["--ctx-size", "512", "--threads", "1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected() -> str:
    return text("--device", "cpu", "--no-spec")


@pytest.mark.parametrize(
    ("engine", "device", "vram"),
    [
        ("llama", "CUDA0", "120MiB"),
        # A torch draft reserves memory, so the limit is larger.
        pytest.param("torch", "cpu", "2GiB", marks=pytest.mark.extra("torch")),
    ],
)
def test_speculation_on_a_streamed_target_gives_the_text_of_the_cpu(
    engine: str, device: str, vram: str, expected: str
) -> None:
    """libllama's draft has its own streams on the device. torch has no CUDA here: it uses a CPU."""
    draft = ("--draft-engine", engine, "--device-draft", device)
    assert text("--device", "CUDA0", "--vram", vram, *STREAMED, *draft) == expected
