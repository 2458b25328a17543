"""Copies and computation on two streams: the events between them are needed and suffice.

A driver with one queue runs submissions in order, so a forgotten event may go unnoticed. Therefore
two copiers take the freedom that the events leave to its ends: one copies as late as it may, the
other at once. Each must be right with the events, and is wrong without.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_gpu import Logits, assert_same, budget, count_orders, half, is_standin, logits, options

from offload.device import DeviceChoice
from offload.engine import Engine
from offload.ggml.backend import Event, copy_now
from offload.streaming.copying import DeviceCopier, Transfer
from offload.streaming.options import StreamingOptions


@pytest.mark.parametrize("prefetch", [True, False])
def test_events_go_both_ways(
    async_gpu: DeviceChoice,
    moe: Path,
    resident_moe: Logits,
    prefetch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    census = count_orders(monkeypatch)
    with Engine(moe, options(async_gpu, half(moe, prefetch=prefetch))) as engine:
        assert_same(async_gpu, logits(engine), resident_moe)
        assert census.copies == engine.counters().copies > 0
    assert census.waits > 0, "the computation waits for copies"
    assert census.fences > 0
    assert census.fenced_copies > 0, "copies wait for the computation"


def test_dense_layers_wait_both_ways_too(
    async_gpu: DeviceChoice, dense: Path, resident_dense: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    census = count_orders(monkeypatch)
    streaming = StreamingOptions(n_gpu_layers=0, bounce=False)
    streaming = replace(streaming, vram_bytes=budget(dense, streaming, "least"))
    with Engine(dense, options(async_gpu, streaming)) as engine:
        assert_same(async_gpu, logits(engine), resident_dense)
    assert census.waits > 0
    assert census.fenced_copies > 0


class LateCopies:
    """Nothing is copied before the computation asks for it."""

    def __init__(self, patch: pytest.MonkeyPatch, *, obey: bool) -> None:
        """`obey`: copy when a ticket is waited for; otherwise only at the next graph's start."""
        self.waiting: list[tuple[Transfer, Any]] = []
        self._copy, self._begin, self._wait = (
            DeviceCopier.copy,
            DeviceCopier.begin,
            DeviceCopier.wait,
        )
        late = self

        def wait(copier: DeviceCopier, tickets: Collection[Event]) -> None:
            late.flush(copier)
            late._wait(copier, [copier.mark()])

        def begin(copier: DeviceCopier) -> None:
            late.flush(copier)
            late._begin(copier)

        patch.setattr(DeviceCopier, "copy", lambda _, *order: late.waiting.append(order))
        patch.setattr(DeviceCopier, "begin", begin)
        patch.setattr(DeviceCopier, "wait", wait if obey else lambda *_: None)

    def flush(self, copier: DeviceCopier) -> None:
        for transfer, after in self.waiting:
            self._copy(copier, transfer, after)
        self.waiting.clear()


class EarlyCopies:
    """Everything is copied on the spot by the host, past the queue in which the device computes."""

    def __init__(self, patch: pytest.MonkeyPatch, *, obey: bool) -> None:
        """`obey`: after the computation that the copy's fence stands for."""
        self.n_fenced = 0

        def copy(_: DeviceCopier, transfer: Transfer, after: Any) -> None:
            if after is not None:
                self.n_fenced += 1
                if obey:
                    after.synchronize()
            copy_now(
                transfer.target,
                transfer.target_bytes,
                transfer.source,
                transfer.source_bytes,
                transfer.size_bytes,
            )

        patch.setattr(DeviceCopier, "copy", copy)


def run(gpu: DeviceChoice, path: Path, streaming: StreamingOptions) -> Logits:
    with Engine(path, options(gpu, streaming)) as engine:
        return logits(engine)


def test_copies_may_be_as_late_as_the_waits_for_them(
    async_gpu: DeviceChoice, moe: Path, resident_moe: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    LateCopies(monkeypatch, obey=True)
    assert_same(async_gpu, run(async_gpu, moe, half(moe)), resident_moe)


def test_without_the_waits_late_copies_are_noticed(
    async_gpu: DeviceChoice, moe: Path, resident_moe: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    LateCopies(monkeypatch, obey=False)
    assert not np.array_equal(run(async_gpu, moe, half(moe)), resident_moe)


def test_copies_may_be_as_early_as_their_fences(
    async_gpu: DeviceChoice, moe: Path, resident_moe: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = EarlyCopies(monkeypatch, obey=True)
    assert_same(async_gpu, run(async_gpu, moe, half(moe)), resident_moe)
    assert early.n_fenced > 0


def test_without_the_fences_early_copies_are_noticed(
    async_gpu: DeviceChoice, dense: Path, resident_dense: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_standin(async_gpu) and not os.environ.get("STANDIN_LAZY"):
        pytest.skip("the stand-in computes as soon as it can, so that copies may not be early")
    early = EarlyCopies(monkeypatch, obey=False)
    streaming = StreamingOptions(n_gpu_layers=0, depth=64, bounce=False)
    streaming = replace(streaming, vram_bytes=budget(dense, streaming, "least"))
    assert not np.array_equal(run(async_gpu, dense, streaming), resident_dense)
    assert early.n_fenced > 0
