"""What is measured of a batch size is what running text then takes, with a cache of 30 %.

In copies, not in seconds: they are what an expert cache makes of a text, and they can be counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import specoffload.session.min_batch
from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from offload.model import layer_of
from offload.plan import min_batch_search
from offload.plan.min_batch import NEVER, MinBatch
from offload.streaming import layer_clock
from offload.streaming.layer_clock import BrokenOff, LayerClock
from offload.streaming.options import StreamingOptions
from specdec.costs.measure import MeasureOptions, TextWalk, measure
from specoffload.session.min_batch import choose_min_batch, streamed_kinds
from specoffload.session.min_batch import measure as measure_both_sides
from specoffload.speculation.profiling import LEAD_TOKENS, real_text

N_MEASURED = 40  # places of the text: one has other experts than the next
N_TOKENS = 500
CACHED = 0.3
SIZES = (1, 4, 32)


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[Engine]:
    """A random model of 8 layers of 32 experts, of which 30 % have slots."""
    path = write_preset(
        "qwen3moe", models / "running.gguf", size="tiny", seed=5, n_layer=8, n_expert=32,
        n_expert_used=3,
    )  # fmt: skip
    one = EngineOptions(device="sim", min_batch=MinBatch(1, 1), n_ctx=1024)
    with Engine(path, one) as whole:
        assert whole.plan is not None
        vram = whole.plan.resident_bytes + int(CACHED * whole.plan.slot_bytes)
    # Guessed copies depend on how far the thread that copies has come.
    streaming = StreamingOptions(vram_bytes=vram, prefetch=False)
    options = EngineOptions(
        device="sim", min_batch=MinBatch(1, 1), n_ctx=1024, n_ubatch=128, streaming=streaming
    )
    with Engine(path, options) as engine:
        assert engine.plan is not None
        assert engine.plan.slot_bytes <= 1.05 * CACHED * whole.plan.slot_bytes
        yield engine


def test_measured_sizes_copy_what_running_text_copies(engine: Engine) -> None:
    text = real_text(engine)

    def copied() -> float:
        """Pieces that were not in their slots when they were needed; a decode always counts."""
        return engine.counters().misses + 1e-6 * engine.counters().graphs

    options = MeasureOptions(max(SIZES), N_MEASURED, (16,), SIZES, lead_tokens=LEAD_TOKENS)
    measured = measure(engine.sequences, text, options, clock=copied).step_s
    for n in SIZES:
        walk = TextWalk(engine.sequences, 0, text, 16, 900)
        running = sum(walk.time_s(n, copied) for _ in range(N_TOKENS // n)) / (N_TOKENS // n)
        assert running > 1.0, "running text copies experts"
        assert measured[n - 1] == pytest.approx(running, rel=0.1), f"{n} tokens"


def test_both_sides_are_timed_on_both_sides(engine: Engine) -> None:
    before, copies = engine.min_batch, engine.counters().misses
    times = measure_both_sides(engine, real_text(engine))
    assert streamed_kinds(engine) == tuple(times) == ("experts",)
    found = times["experts"]
    assert 1 in found.cpu
    assert 1 in found.streamed
    assert len(set(found.cpu) & set(found.streamed)) >= 2
    assert min(*found.cpu.values(), *found.streamed.values()) > 0
    assert max(*found.cpu, *found.streamed) <= 128, "the ubatch"
    assert engine.counters().misses > copies
    assert engine.min_batch == before
    assert engine.sequences.length(0) == 0


def test_a_decode_is_broken_off_behind_some_layers_which_tell_what_all_take(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = real_text(engine)
    assert engine.device is not None
    assert engine.plan is not None
    layers = sorted({layer_of(entry.name) for entry in engine.plan.streamed})

    def misses() -> float:
        return float(sum(e.schedule.counters.misses for e in engine.device.executors.values()))

    walk = TextWalk(engine.sequences, 0, text, 0, 900)
    walk.lead(32, 4)
    whole = sum(walk.time_s(32, misses) for _ in range(4)) / 4
    monkeypatch.setattr(layer_clock, "time", SimpleNamespace(perf_counter=misses))
    parts = []
    for _ in range(4):
        clock, length = LayerClock(layers[1], layers[5]), engine.sequences.length(0)
        with pytest.raises(BrokenOff), engine.device.timing_layers(clock):
            walk.time_s(32)
        assert engine.sequences.length(0) in (0, length), "what was broken off is forgotten"
        parts.append(clock.seconds_of(layers))
    assert sum(parts) / 4 == pytest.approx(whole, rel=0.2)
    monkeypatch.undo()
    # The CPU's side, and decodes as before once no clock is asked.
    engine.set_min_batch_by_decoding(MinBatch(NEVER, NEVER))
    graphs = [engine.device.n_graphs]
    walk.time_s(32)
    graphs.append(engine.device.n_graphs)
    clock = LayerClock(layers[1], layers[3])
    with pytest.raises(BrokenOff), engine.device.timing_layers(clock):
        walk.time_s(32)
    assert 0 < engine.device.n_graphs - graphs[1] < 0.6 * (graphs[1] - graphs[0])
    assert clock.seconds_of(layers) > 0.0
    engine.sequences.rewind(0, 0)
    on_cpu = engine.sequences.extend(0, text[:8], 1)
    engine.set_min_batch_by_decoding(MinBatch(1, 1))
    engine.sequences.rewind(0, 0)
    assert engine.sequences.extend(0, text[:8], 1) == pytest.approx(on_cpu, abs=1e-3)


@pytest.mark.parametrize("overlap", [True, False])
def test_large_batches_are_timed_in_part(
    overlap: bool, engine: Engine, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(min_batch_search, "_IN_PART_FROM_S", 0.0)
    clocks: list[LayerClock] = []

    class Noted(LayerClock):
        def __init__(self, first: int, last: int) -> None:
            super().__init__(first, last)
            clocks.append(self)

    monkeypatch.setattr(specoffload.session.min_batch, "LayerClock", Noted)
    streaming = replace(engine.options.streaming, depth=8 if overlap else 0)
    options = replace(engine.options, streaming=streaming)
    with Engine(engine.facts.path, options) as other:
        found = measure_both_sides(other, real_text(other))["experts"]
    assert clocks
    assert min(*found.cpu.values(), *found.streamed.values()) > 0


def test_a_choice_is_measured_once_and_a_damaged_one_anew(engine: Engine, tmp_path: Path) -> None:
    first = choose_min_batch(engine, tmp_path)
    assert "not measured on this machine yet; measured in" in first.note
    (file,) = tmp_path.iterdir()
    again = choose_min_batch(engine, tmp_path)
    assert again.min_batch == first.min_batch
    assert "measured at an earlier start" in again.note
    assert str(file) in again.note
    whole = file.read_text(encoding="utf-8")
    for damaged, words in (
        (whole[:-9], "cannot be read"),
        (whole.replace('"format": 1', '"format": 7'), "of another run"),
        (whole.replace('"cpu"', '"gpu"'), "damaged"),
        ("[]", "damaged"),
    ):
        file.write_text(damaged, encoding="utf-8")
        note = choose_min_batch(engine, tmp_path).note
        assert words in note
        assert "measured in" in note


def test_a_folder_that_cannot_be_written_ends_nothing(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "not stored" in choose_min_batch(engine, file / "below").note


def test_where_nothing_may_be_measured_the_rule_holds(engine: Engine) -> None:
    chosen = choose_min_batch(engine, None)
    assert chosen.min_batch == MinBatch(342, 32), "32 tokens per 3 of 32 experts"
    assert "nothing is measured" in chosen.note
