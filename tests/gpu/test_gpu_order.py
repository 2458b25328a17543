"""The events between copies and computation on two streams are needed and suffice.

A driver with one queue runs submissions in order, so a forgotten event may go unnoticed. Therefore
one fake copier copies as late as the events allow, and another as early. Each gives right results
with the events and wrong results without.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from on_gpu import Logits, assert_same, is_standin, logits_of, options, slots_for

from offload.device import DeviceChoice
from offload.ggml.backend import StreamEvent, copy_now
from offload.ggml.memory import HostRange
from offload.ggml.tensor import host_bytes, new_tensor
from offload.stream.copying import DeviceCopier, Transfer


class LateCopies:
    """Delays each copy until the computation waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch, *, obey: bool) -> None:
        """With `obey`, copy when a ticket is waited for; otherwise when the next graph starts."""
        self.waiting: list[tuple[Transfer, Any]] = []
        self._copy, begin, wait = DeviceCopier.copy, DeviceCopier.begin, DeviceCopier.wait

        def late_wait(copier: DeviceCopier, tickets: Collection[StreamEvent]) -> None:
            if obey:
                self.flush(copier)
                wait(copier, [copier.mark()])

        def late_begin(copier: DeviceCopier) -> None:
            self.flush(copier)
            begin(copier)

        patch.setattr(DeviceCopier, "copy", lambda _, *order: self.waiting.append(order))
        patch.setattr(DeviceCopier, "begin", late_begin)
        patch.setattr(DeviceCopier, "wait", late_wait)

    def flush(self, copier: DeviceCopier) -> None:
        for transfer, after in self.waiting:
            self._copy(copier, transfer, after)
        self.waiting.clear()


class EarlyCopies:
    """Copies at once on the host, without regard to the device's compute queue."""

    def __init__(self, patch: pytest.MonkeyPatch, *, obey: bool) -> None:
        """With `obey`, a copy first waits for its fence."""
        self.n_fenced = 0

        def copy(_: DeviceCopier, transfers: Sequence[Transfer], after: Any) -> None:
            if after is not None:
                self.n_fenced += 1
                if obey:
                    after.synchronize()
            for transfer in transfers:
                copy_now(*transfer[:5])

        patch.setattr(DeviceCopier, "copy", copy)


@pytest.mark.parametrize("obey", [True, False])
def test_copies_may_be_as_late_as_the_waits_for_them_and_no_later(
    async_gpu: DeviceChoice,
    moe: Path,
    resident_moe: Logits,
    obey: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    LateCopies(monkeypatch, obey=obey)
    got = logits_of(moe, options(async_gpu, slots_for(moe, "half")))
    if obey:
        assert_same(async_gpu, got, resident_moe)
    else:
        assert not np.array_equal(got, resident_moe)


@pytest.mark.parametrize(("model", "obey"), [("moe", True), ("dense", True), ("dense", False)])
def test_copies_may_be_as_early_as_their_fences_and_no_earlier(
    async_gpu: DeviceChoice,
    model: str,
    obey: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, resident = request.getfixturevalue(model), request.getfixturevalue(f"resident_{model}")
    streaming = slots_for(path, "half")
    if model == "dense":
        streaming = slots_for(path, "least", n_gpu_layers=0, depth=64)
    if not obey and is_standin(async_gpu) and not os.environ.get("STANDIN_LAZY"):
        pytest.skip("the stand-in computes as soon as it can, so that copies may not be early")
    early = EarlyCopies(monkeypatch, obey=obey)
    got = logits_of(path, options(async_gpu, streaming))
    assert early.n_fenced > 0
    if obey:
        assert_same(async_gpu, got, resident)
    else:
        assert not np.array_equal(got, resident)


def test_what_copies_leave_behind_is_freed_from_graph_to_graph(async_gpu: DeviceChoice) -> None:
    device, process = async_gpu.device, psutil.Process()
    source = np.zeros(4096, np.uint8)
    held = host_bytes(HostRange(source.ctypes.data, source.nbytes, source))
    buffer = device.allocate(source.nbytes, "a copy's target")
    target = new_tensor("i8", (source.nbytes, 1, 1, 1), (buffer, 0))
    compute = device.open()
    copier = DeviceCopier(compute)

    def grown_bytes(n_graphs: int) -> int:
        before = process.memory_info().rss
        for _ in range(n_graphs):
            copier.begin()
            for _ in range(40):
                copier.copy([Transfer(target, 0, held, 0, source.nbytes)], None)
                copier.mark()
        return int(process.memory_info().rss - before)

    try:
        grown_bytes(50)  # the first graphs allocate memory that later ones reuse
        assert grown_bytes(100) < 100 * 40 * 100
    finally:
        copier.close()
        compute.close()
        buffer.close()
