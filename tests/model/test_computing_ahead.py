"""Decodes that compute layers ahead, and repair them after a miss, give the same bits.

`sim` computes synchronously, so a wait costs it nothing and the player never computes ahead on it.
These tests therefore set the number of layers per wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from budgets import limited
from player_calls import Compute, computing
from test_hybrid import PRESETS, Rows, logits, options, split_by

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.decode import SMALL_BATCH
from offload.engine import Engine, open_engine
from offload.errors import DeviceFailed
from offload.ggml.backend import Device
from offload.ggml.library import abi
from offload.schedule.slots import StreamCounters
from offload.schedule.splitter import Splitter, all_on_device, stay
from offload.stream import play
from offload.stream.layers_ahead import AheadEntry

SPLITS = {"stay": stay, "all-device": all_on_device}


@pytest.fixture(scope="module", params=PRESETS)
def model(request: pytest.FixtureRequest, models: Path) -> tuple[Path, Rows, bool]:
    """Return a random model, its logits with all weights resident, and whether repairs work."""
    path = models / f"ahead-{request.param}.gguf"
    write_preset(PRESETS[request.param], path, size="tiny", seed=1)
    with open_engine(path, engine_options(options(Streaming(), 1), stream_experts=False)) as engine:
        return path, repeated(engine), request.param != "qwen35moe"


def choose(monkeypatch: pytest.MonkeyPatch, *layers_per_wait: int) -> None:
    """Make decodes compute these numbers of layers per wait, in turn."""
    numbers = cycle(layers_per_wait)

    class Chosen(play.Waits):
        def choose(self, n_layers: int) -> int:
            return min(n_layers, next(numbers))

    monkeypatch.setattr(play, "Waits", Chosen)


def repeated(engine: Engine) -> Rows:
    """Return the logits of batches, of one token many times, and of the batches again."""
    rows = [logits(engine)]
    engine.sequences.rewind(0, 0)
    rows += [engine.sequences.extend(0, [7]) for _ in range(12)]
    engine.sequences.rewind(0, 0)
    return np.concatenate([*rows, logits(engine)])


def went_ahead(counters: StreamCounters) -> bool:
    assert counters.layers_repeated >= counters.n_repairs
    return counters.layers_ahead + counters.n_repairs > 0


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layers_per_wait", [(2,), (99,), (1, 3, 99, 2)])
def test_repairs_give_the_resident_models_bits(
    model: tuple[Path, Rows, bool], split: str, layers_per_wait: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, expected, is_repeatable = model
    choose(monkeypatch, *layers_per_wait)
    with open_engine(path, split_by(SPLITS[split], path, "half")) as engine:
        assert np.array_equal(repeated(engine), expected)
        counters = engine.counters()
    assert went_ahead(counters) == is_repeatable
    if split == "all-device" and is_repeatable:  # otherwise hits depend on the time of copies
        assert min(counters.layers_ahead, counters.n_repairs) > 0


def test_streamed_layers_are_repaired_too(
    model: tuple[Path, Rows, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected, is_repeatable = model
    choose(monkeypatch, 99, 3, 2)
    streaming = limited(path, Streaming(), "half")
    with open_engine(path, options(streaming, 1)) as engine:
        assert np.array_equal(repeated(engine), expected)
        assert went_ahead(engine.counters()) == is_repeatable


def test_batches_of_every_size_are_repaired(
    model: tuple[Path, Rows, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, is_repeatable = model
    choose(monkeypatch, 99, 2)

    def of_every_size(engine: Engine) -> Iterator[Rows]:
        for n in range(1, SMALL_BATCH + 1):
            yield engine.sequences.extend(0, [(11 * i + 3 * n) % engine.n_vocab for i in range(n)])
            engine.sequences.rewind(0, 0)

    resident = engine_options(options(Streaming(), 1), stream_experts=False)
    with (
        open_engine(path, resident) as whole,
        open_engine(path, split_by(stay, path, "half")) as split,
    ):
        for n, rows in enumerate(zip(of_every_size(whole), of_every_size(split), strict=True), 1):
            assert np.array_equal(*rows), n
        counters = split.counters()
    assert (counters.n_repairs > SMALL_BATCH / 2) == is_repeatable


def test_prepared_graphs_share_the_host_memory_for_ids(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server prepares graphs all day. Each must not take pinned memory that is never freed."""
    asked, n_entries = [], 0

    def pinned_memory(device: Device, size_bytes: int) -> None:
        asked.append(size_bytes)  # this device pins nothing

    def made(*args: object) -> AheadEntry:
        nonlocal n_entries
        n_entries += 1
        return AheadEntry(*args)  # type: ignore[arg-type]

    choose(monkeypatch, 99)
    monkeypatch.setattr(Device, "pinned_memory", pinned_memory)
    monkeypatch.setattr("offload.stream.program.AheadEntry", made)
    with open_engine(tiny_moe, split_by(stay, tiny_moe, "half")) as engine:
        before = len(asked)
        for n in range(1, SMALL_BATCH + 1):
            engine.sequences.extend(0, [(11 * i + 3 * n) % engine.n_vocab for i in range(n)])
            engine.sequences.rewind(0, 0)
    assert n_entries > SMALL_BATCH / 2
    assert len(asked) - before <= 8, "among them the table of slots, and a buffer that doubles"


@pytest.mark.parametrize("splitter", SPLITS.values(), ids=SPLITS)
def test_a_decode_that_ends_anywhere_is_redone(
    tiny_moe: Path, splitter: Splitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decode fails or is ended at a later computation than the one before."""
    n_computed, ends_at, status = 0, -1, 0

    def made(inner: Compute) -> Compute:
        def end(stream: int, graph: int) -> int:
            nonlocal n_computed
            n_computed += 1
            return status if n_computed == ends_at else inner(stream, graph)

        return end

    with open_engine(
        tiny_moe, engine_options(options(Streaming(), 1), stream_experts=False)
    ) as one:
        expected = repeated(one)
    choose(monkeypatch, 99, 2)
    computing(monkeypatch, made)
    with open_engine(tiny_moe, split_by(splitter, tiny_moe, "half")) as one:
        for nth in range(1, 20):
            ends_at, n_computed = nth, 0
            status = abi.GGML_STATUS_ABORTED if nth % 2 else abi.GGML_STATUS_FAILED
            try:
                one.sequences.extend(0, [1, 2, 3, 250, 99])
            except DeviceFailed:
                assert one.sequences.length(0) == 0
            one.sequences.rewind(0, 0)
        ends_at = -1
        assert np.array_equal(repeated(one), expected)
        assert one.counters().n_repairs > 0
