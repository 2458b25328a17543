"""The table of what ggml's backends do differently."""

from __future__ import annotations

import pytest

from offload.backends import (
    BACKENDS,
    CPU,
    CUDA,
    OTHER,
    ROCM,
    SIM,
    VULKAN,
    Backend,
    backend_of,
    number_of,
)


def test_devices_have_the_backend_that_their_names_begin_with() -> None:
    names = {"CUDA0": CUDA, "ROCm11": ROCM, "Vulkan1": VULKAN, "CPU": CPU, "cpu": CPU,
             "sim": SIM, "sim:bw=1GB/s,sim": SIM, "sim1": SIM, "CANN0": OTHER, "auto": OTHER,
             "": OTHER}  # fmt: skip
    assert {name: backend_of(name) for name in names} == names
    assert len({one.name.lower() for one in BACKENDS}) == len(BACKENDS)


@pytest.mark.parametrize(
    ("name", "number"), [("CUDA0", 0), ("ROCm12", 12), ("CUDA", None), ("CUDA0x", None)]
)
def test_numbers_end_the_names(name: str, number: int | None) -> None:
    assert number_of(name) == number


def test_a_backend_that_nobody_has_seen_can_do_nothing_special() -> None:
    assert Backend("") == OTHER
