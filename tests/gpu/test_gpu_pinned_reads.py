"""Rows of prompts are read by kernels or copied, as measured, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_gpu import Logits, assert_same, options, slots_for
from splits import SPLITTERS

from lab.options import engine_options
from offload.backends import CUDA
from offload.device import DeviceChoice
from offload.engine import EngineOptions, open_engine
from offload.errors import DeviceFailed
from offload.ggml.backend import Device, Stream
from offload.ggml.cuda_driver import maps_pinned
from offload.ggml.tensor import Buffer
from offload.notes import NoteKind, kind_of
from offload.stream.cpu_side import HostGraph
from offload.stream.pass_runner import PassRunner
from offload.stream.passes import PassGraph, PinnedLaunch
from offload.stream.prompt_side import CpuPart
from offload.stream.read_speed import measure_reads
from offload.times.mapped_reads import MappedReads

FAST = MappedReads(1.5e-6, 24e9, 12e9, 6e-6, 25e9)
SLOW = replace(FAST, bytes_per_s=6e9)
BATCHES = (100, 3, 70)


@pytest.fixture
def cuda(gpu: DeviceChoice) -> DeviceChoice:
    if not maps_pinned(gpu.device):
        pytest.skip(f"kernels of {gpu.name} do not read pinned memory")
    return gpu


def shared(gpu: DeviceChoice, path: Path, **changes: Any) -> EngineOptions:
    """Options with which the CPU computes a part of each layer of a prompt."""
    streaming = slots_for(path, "half", hybrid=True, splitter=SPLITTERS["random"](), lend=False)
    return engine_options(options(gpu, streaming, n_ctx=512, n_ubatch=128), **changes)


def run(path: Path, opened: EngineOptions) -> tuple[Logits, list[str]]:
    """The logits of two prompts and a small batch, and the lines on how rows come."""
    with open_engine(path, opened) as engine:
        rows = []
        for n in BATCHES:
            engine.sequences.rewind(0, 0)
            tokens = [(13 * i + 5 * n) % engine.n_vocab for i in range(n)]
            rows.append(engine.sequences.extend(0, tokens, n_logits=n))
        assert engine.counters().n_pairs_host > 0
        notes = engine.opened.notes
        return np.concatenate(rows), [note for note in notes if kind_of(note) is NoteKind.COPIES]


def seen(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, called: list[str]) -> None:
    """Note in `called` each call of a method."""
    method = getattr(owner, name)

    def noted(*arguments: Any) -> Any:
        called.append(name)
        return method(*arguments)

    monkeypatch.setattr(owner, name, noted)


def test_both_ways_give_the_same_bits(
    cuda: DeviceChoice, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[str] = []
    kinds = [(PinnedLaunch, "fill"), (PassGraph, "gather_to"), (PassGraph, "read_from")]
    for owner, name in kinds:
        seen(monkeypatch, owner, name, ways)
    by_kernels, said = run(moe, shared(cuda, moe, measure_reads=lambda _: FAST))
    assert {*ways} == {"fill", "gather_to", "read_from"}
    assert said == [f"{cuda.name}: kernels read rows of prompts from RAM: {FAST.words}"]
    ways.clear()
    by_copies, said = run(moe, shared(cuda, moe, measure_reads=lambda _: SLOW))
    assert not ways
    assert said == [f"{cuda.name}: copies bring rows of prompts from RAM: {SLOW.words}"]
    assert_same(cuda, by_copies, by_kernels)


def test_kernels_gather_each_row_that_the_cpu_needs_once(
    cuda: DeviceChoice, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, n_blocks = list[list[int]](), list[int]()
    gather, gather_to = CpuPart.gather, PassGraph.gather_to

    def gathers(self: CpuPart, *others: Any) -> Any:
        wanted = np.unique(self.rows)
        gathered.append([])
        n_blocks.append(len(self.blocks))
        done = gather(self, *others)
        assert sum(gathered[-1]) == len(wanted)
        assert len(gathered[-1]) <= len(self.blocks)
        return done

    def gathers_to(self: PassGraph, pinned: Buffer, wanted_at: int, rows_at: int, n: int) -> None:
        gathered[-1].append(n)
        gather_to(self, pinned, wanted_at, rows_at, n)

    monkeypatch.setattr(CpuPart, "gather", gathers)
    monkeypatch.setattr(PassGraph, "gather_to", gathers_to)
    run(moe, shared(cuda, moe, measure_reads=lambda _: FAST))
    assert max(n_blocks) > 1, "the CPU begins when the rows of its first block are there"
    assert max(map(len, gathered)) > 1


def test_a_failure_waits_for_the_kernels_that_write_rows_to_pinned_memory(
    cuda: DeviceChoice, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, waited = list[Stream](), list[Stream]()
    gather, abandon, synchronize = CpuPart.gather, PassRunner.abandon, Stream.synchronize

    def gathers(self: CpuPart, graph: PassGraph, stream: Stream, *others: Any) -> Any:
        writing.append(stream)
        return gather(self, graph, stream, *others)

    def abandons(self: PassRunner) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "synchronize", waits)
            abandon(self)

    def waits(self: Stream) -> None:
        waited.append(self)
        synchronize(self)

    def fails(self: HostGraph, *_: object) -> int:
        raise DeviceFailed("the CPU is gone")

    monkeypatch.setattr(CpuPart, "gather", gathers)
    monkeypatch.setattr(PassRunner, "abandon", abandons)
    monkeypatch.setattr(HostGraph, "compute", fails)
    with pytest.raises(DeviceFailed, match="the CPU is gone"):
        run(moe, shared(cuda, moe, measure_reads=lambda _: FAST))
    assert writing[-1] in waited


def test_a_measurement_that_fails_leaves_rows_to_copies(cuda: DeviceChoice, moe: Path) -> None:
    def fails(_: DeviceChoice) -> MappedReads:
        raise DeviceFailed("no such kernel")

    _, said = run(moe, shared(cuda, moe, measure_reads=fails))
    assert said == [
        f"{cuda.name}: copies bring rows of prompts from RAM: how fast kernels read them was not "
        "measured: no such kernel"
    ]


@pytest.mark.parametrize("is_integrated", [False, True])
def test_devices_without_a_link_or_mapped_memory_are_not_measured(
    gpu: DeviceChoice, moe: Path, monkeypatch: pytest.MonkeyPatch, is_integrated: bool
) -> None:
    asked: list[DeviceChoice] = []

    def measured(choice: DeviceChoice) -> MappedReads:
        asked.append(choice)
        return FAST

    if is_integrated:
        monkeypatch.setattr(Device, "is_integrated", True)
    _, said = run(moe, shared(gpu, moe, measure_reads=measured))
    assert bool(asked) == bool(said) == (gpu.device.backend is CUDA and not is_integrated)


def test_a_measurement_has_plausible_values(cuda: DeviceChoice) -> None:
    found = measure_reads(cuda)
    assert max(found.first_s, found.copy_first_s) < 1e-2
    assert min(found.bytes_per_s, found.beside_bytes_per_s, found.copy_bytes_per_s) > 1e7
