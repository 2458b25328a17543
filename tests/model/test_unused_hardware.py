"""A start says which hardware the library does not use, such as a card whose driver is old."""

from __future__ import annotations

import in_process
import pytest

from offload.opening import opened

WHY = "the NVIDIA driver runs CUDA 12.4, and this library needs CUDA 13"


@pytest.mark.parametrize("words", [("run", "-p", "import os", "-n", "1"), ("chat", "-n", "1")])
def test_a_start_names_hardware_that_it_does_not_use(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def missing(*, has_gpu: bool) -> tuple[str, ...]:
        asked.append(has_gpu)
        return (WHY,)

    monkeypatch.setattr(opened, "missing_in_build", missing)
    done = in_process.command(*words, stdin="import os\n")
    assert done.returncode == 0, done.stderr
    assert asked
    assert done.stderr.split("\n").count(WHY) == 1
