"""Batches whose experts have no slots all at once: chunks of tokens, the bits of the slow twin."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budgets import budget
from numpy.typing import NDArray

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from offload.errors import DeviceFailed
from offload.ggml.backend import RouterIds, Stream
from offload.model_file import read_facts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import PlanRequest, make_plan
from offload.split.switch import all_on_device
from offload.streaming import chunks
from offload.streaming.copying import ThreadCopier, Transfer
from offload.streaming.options import StreamingOptions

# A ubatch of 64, the last one short; one token; chunks again.
BATCHES = (1, 5, 40, 3, 70)


def options(streaming: StreamingOptions) -> EngineOptions:
    return EngineOptions(
        device="sim",
        streaming=streaming,
        min_batch=MinBatch(1, 1),
        n_ctx=256,
        n_ubatch=64,
        n_outputs=128,
    )


def tight(path: Path, n_more: int = 0, **changes: object) -> StreamingOptions:
    """Slots for one token's experts and `n_more`."""
    streaming = StreamingOptions(n_gpu_layers=99, chunks="on")
    least = budget(path, streaming, "least")
    plan = make_plan(read_facts(path), PlanRequest(budget_bytes=least, n_gpu_layers=99))
    slot_bytes = max(pool.slot_bytes for pool in plan.layout.pools)
    return replace(streaming, vram_bytes=least + n_more * slot_bytes, **changes)  # type: ignore[arg-type]


def logits(engine: Engine, batches: Sequence[int] = BATCHES) -> NDArray[np.float32]:
    rows = [
        engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        for n in batches
    ]
    return np.concatenate(rows)


# Gate, up and down; with biases; with an input that down is written over.
@pytest.fixture(scope="module", params=["deepseek-v3", "gpt-oss-20b", "llama-4-scout"])
def model(models: Path, request: pytest.FixtureRequest) -> Path:
    return write_preset(request.param, models / f"chunks-{request.param}.gguf", seed=1)


@pytest.fixture(scope="module")
def expected(model: Path) -> NDArray[np.float32]:
    with Engine(model, options(StreamingOptions(depth=0, prefetch=False))) as engine:
        return logits(engine)


@pytest.mark.parametrize("n_more", [0, 6])
def test_chunks_give_the_bits_of_the_serial_twin(
    model: Path, expected: NDArray[np.float32], n_more: int
) -> None:
    with Engine(model, options(tight(model, n_more))) as engine:
        assert np.array_equal(logits(engine), expected)
        counters = engine.counters()
        assert engine.device is not None
        assert not engine.device.declined
        assert counters.chunks > 4 * 3
        assert counters.hits > 0 or not n_more, "neighbouring chunks share experts"


def test_products_one_by_one_give_the_same_where_the_nodes_between_cannot_be_cut(
    model: Path, expected: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(model, options(tight(model, 3))) as engine:
        logits(engine)
        together = engine.counters()
    monkeypatch.setattr(chunks, "_together", lambda graph, members: None)
    with Engine(model, options(tight(model, 3))) as engine:
        assert np.array_equal(logits(engine), expected)
        assert engine.counters().chunks == 3 * together.chunks
        assert engine.counters().streamed_bytes > together.streamed_bytes


def test_a_copy_that_fails_in_a_chunk_fails_that_decode(
    model: Path, expected: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, n_copies = ThreadCopier._copy, 0

    def fail_once(self: ThreadCopier, transfer: Transfer) -> None:
        nonlocal n_copies
        n_copies += 1
        if n_copies == 40:
            raise OSError("the link is gone")
        copy(self, transfer)

    monkeypatch.setattr(ThreadCopier, "_copy", fail_once)
    with Engine(model, options(tight(model, 2))) as engine:
        with pytest.raises(DeviceFailed, match="the link is gone"):
            engine.sequences.extend(0, [(3 * i) % 200 for i in range(40)])
        engine.sequences.rewind(0, 0)
        assert np.array_equal(logits(engine), expected)


@pytest.mark.parametrize("batches", [(9, 1, 12, 20, 9), (2, 3, 1, 8, 2, 5)])
def test_a_band_of_the_slots_gives_the_same(models: Path, batches: Sequence[int]) -> None:
    """The second batches are small: some GPUs multiply these by a matrix kernel too."""
    path = write_preset("deepseek-v3", models / "band.gguf", seed=1, n_expert=64)
    with Engine(path, options(StreamingOptions(depth=0, prefetch=False))) as engine:
        expected = logits(engine, batches)
    with Engine(path, options(StreamingOptions())) as engine:
        assert np.array_equal(logits(engine, batches), expected)
        assert engine.counters().bands > 0


@pytest.mark.parametrize("bad", [-1, 1 << 20])
@pytest.mark.parametrize("way", ["chosen", "chunks", "split", "serial"])
def test_a_choice_that_is_no_expert_ends_the_decode_and_not_the_process(
    model: Path, way: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that computes wrong numbers may name any: memory past the weights would be read."""
    streaming = {
        "chosen": StreamingOptions(),
        "chunks": tight(model),
        "split": StreamingOptions(hybrid=True, splitter=all_on_device),
        "serial": StreamingOptions(depth=0, prefetch=False),
    }[way]
    read = Stream.read

    def damaged(self: Stream, ids: RouterIds, *more: Any) -> NDArray[np.int32]:
        ctypes.c_int32.from_address(ids.tensor.position).value = bad
        return read(self, ids, *more)

    text = [(3 * i) % 200 for i in range(40 if way == "chunks" else 2)]
    with Engine(model, options(streaming)) as engine:
        wanted = engine.sequences.extend(0, text)
        engine.sequences.rewind(0, 0)
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "read", damaged)
            with pytest.raises(DeviceFailed, match=rf"the router chose expert {bad} of \d+"):
                engine.sequences.extend(0, text)
        assert engine.sequences.length(0) == 0
        assert np.array_equal(engine.sequences.extend(0, text), wanted)
