"""The measured cost of a batch size equals its cost in running text, with slots for 30 %.

Costs are counted in copies instead of seconds, because copies depend only on the cache and the
text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload import measuring
from offload.engine import Engine, open_engine
from offload.measuring import Clock, TextWalk, measure, streamed_kinds
from offload.model import layer_of
from offload.stream import layer_clock
from offload.stream.layer_clock import BrokenOff, LayerClock
from offload.times.min_batch import NEVER, MinBatch
from offload.times.search import TimingRequest
from offload.times.table import CostTable, Way
from specoffload.opening.draft_model import real_text

N_TOKENS = 320
CACHED = 0.3
WAYS = (Way.IN_PLACE, Way.STREAMED)


@pytest.fixture(scope="module")
def engine(models: Path) -> Iterator[Engine]:
    """A random model of 8 layers of 32 experts, of which 30 % have slots."""
    path = write_preset(
        "qwen3moe", models / "running.gguf", size="tiny", seed=5, n_layer=8, n_expert=32,
        n_expert_used=3,
    )  # fmt: skip
    one = engine_options(device="sim", min_batch=MinBatch(1, 1), n_ctx=1024)
    with open_engine(path, one) as whole:
        assert whole.opened.plan is not None
        vram = whole.opened.plan.resident_bytes + int(CACHED * whole.opened.plan.slot_bytes)
    # Prefetching is off, because the number of prefetched copies depends on timing.
    streaming = Streaming(vram_bytes=vram, prefetch=False)
    options = engine_options(
        device="sim", min_batch=MinBatch(1, 1), n_ctx=1024, n_ubatch=128, streaming=streaming
    )
    with open_engine(path, options) as engine:
        assert engine.opened.plan is not None
        assert engine.opened.plan.slot_bytes <= 1.05 * CACHED * whole.opened.plan.slot_bytes
        yield engine


def test_measured_sizes_copy_what_running_text_copies(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = real_text(engine)

    def copied() -> float:
        """A clock that counts misses as time. Each decode adds a little, so that no time is 0."""
        return 1e-6 * engine.counters().misses + 1e-12 * engine.counters().graphs

    walked = TextWalk.time_s
    monkeypatch.setattr(
        TextWalk, "time_s", lambda self, n, clock=copied, n_logits=None: walked(
            self, n, copied, n_logits
        )
    )  # fmt: skip
    table = CostTable(32, 3)
    request = TimingRequest((Way.STREAMED,), n_least=12, n_verify=16)
    measure(engine, text, table, request, "2026-01-02", most_s=40.0)
    for n in (1, 4, 16):
        walk = TextWalk(engine.sequences, 0, text, 16, 900)
        running = sum(walk.time_s(n) for _ in range(N_TOKENS // n)) / (N_TOKENS // n)
        assert running > 1e-6, "running text copies experts"
        assert table.seconds(Way.STREAMED, n) == pytest.approx(running, rel=0.15), f"{n} tokens"


def test_sizes_of_drafts_are_timed_after_another_size(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts change the batch size. Without drafts, decodes of one token follow each other."""
    walked, led = TextWalk.time_s, TextWalk.lead
    sizes: list[int] = []  # batch sizes of all decodes
    timed: list[int] = []  # indices of the timed decodes
    is_leading = [False]

    def time_s(
        walk: TextWalk, n: int, clock: Clock = perf_counter, n_logits: int | None = None
    ) -> float:
        if not is_leading[0] and n_logits != 0:  # a decode without logits begins a way
            timed.append(len(sizes))
        sizes.append(n)
        return walked(walk, n, clock, n_logits)

    def lead(walk: TextWalk, n: int, n_decodes: int, n_logits: int | None = None) -> float:
        is_leading[0] = True
        seconds = led(walk, n, n_decodes, n_logits)
        is_leading[0] = False
        return seconds

    monkeypatch.setattr(TextWalk, "time_s", time_s)
    monkeypatch.setattr(TextWalk, "lead", lead)
    request = TimingRequest(WAYS, n_least=2, n_verify=8, n_most=8)
    measure(engine, real_text(engine), CostTable(32, 3), request, "2026-01-02", most_s=20.0)
    before = {n: [sizes[at - 1] for at in timed if sizes[at] == n and at] for n in (1, 2, 4, 8)}
    assert all(len(found) >= 2 for found in before.values())
    assert {n: set(found) for n, found in before.items() if n > 1} == {n: {1} for n in (2, 4, 8)}
    assert before[1].count(1) >= len(before[1]) - 4, "all but the first ones"


@pytest.mark.parametrize("in_part", [False, True])
def test_every_way_is_timed_in_one_pass(
    engine: Engine, in_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long decodes are broken off after some layers."""
    clocks: list[LayerClock] = []
    if in_part:

        class Noted(LayerClock):
            def __init__(self, first: int, last: int) -> None:
                super().__init__(first, last)
                clocks.append(self)

        monkeypatch.setattr(measuring, "_IN_PART_FROM_S", 0.0)
        monkeypatch.setattr(measuring, "LayerClock", Noted)
    now_s, entered_s = [0.0], list[float]()

    def tick() -> float:
        now_s[0] += 0.01
        return now_s[0]

    monkeypatch.setattr(measuring, "perf_counter", tick)  # the clock of the budget
    before, copies, text = engine.min_batch, engine.counters().misses, real_text(engine)
    table = CostTable(32, 3)
    seconds = measure(
        engine, text, table, TimingRequest(WAYS), "2026-01-02", most_s=1.0,
        on_entry=lambda: entered_s.append(now_s[0]),
    )  # fmt: skip
    # A timing that has begun is ended, but none begins after the budget.
    assert len(entered_s) > 4
    assert entered_s[-2] < 1.0
    assert seconds == pytest.approx(now_s[0], abs=0.015)
    assert streamed_kinds(engine) == ("experts",)
    assert all(1 in table.measured(way) and len(table.measured(way)) >= 2 for way in WAYS)
    assert table.n_most <= 128, "the ubatch"
    assert bool(clocks) == in_part
    assert engine.counters().misses > copies
    assert engine.min_batch == before
    assert engine.sequences.length(0) == 0


def test_a_decode_is_broken_off_behind_some_layers_which_tell_what_all_take(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = real_text(engine)
    assert engine.device is not None
    assert engine.opened.plan is not None
    layers = sorted({layer_of(entry.name) for entry in engine.opened.plan.streamed})

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
    engine.sequences.rewind(0, 0)
    engine.set_min_batch(MinBatch(NEVER, NEVER))
    engine.build_anew()
    on_cpu = engine.sequences.extend(0, text[:8], 1)
    engine.sequences.rewind(0, 0)
    engine.set_min_batch(MinBatch(1, 1))
    engine.build_anew()
    assert engine.sequences.extend(0, text[:8], 1) == pytest.approx(on_cpu, abs=1e-3)
    engine.sequences.rewind(0, 0)
