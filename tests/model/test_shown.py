"""What one meets in a debugger shows its name and its key numbers in one line."""

from __future__ import annotations

from pathlib import Path

from splits import at_random, sim_options, split_streaming

from lab.options import engine_options
from offload.engine import open_engine


def test_objects_show_themselves_in_a_line(tiny_moe: Path) -> None:
    options = sim_options(
        split_streaming(at_random(1), tiny_moe, "half"), n_ubatch=64, n_outputs=64
    )
    half = engine_options(options, ram_bytes=1000 << 10)  # not all experts fit
    with open_engine(tiny_moe, half) as engine:
        engine.sequences.extend(0, [1, 2, 3])
        assert engine.device is not None
        store = engine.opened.weights.store
        assert store is not None
        (executor,) = engine.device.executors.values()
        pool = executor.schedule.pools[0]
        shown = {type(one).__name__: repr(one) for one in (
            engine, engine.sequences, engine.device, engine.device.inner, executor,
            executor._stream, executor.schedule, pool, store, store.experts,
        )}  # fmt: skip
    assert shown["Engine"] == f"Engine({tiny_moe.name} on sim, 512 cells)"
    assert shown["Sequences"] == "Sequences(1 of 512 cells, lengths [3])"
    assert shown["Device"] == "Device(CPU)"
    assert shown["PoolSlots"].startswith(f"PoolSlots({pool.n_slots}: ")
    assert shown["Schedule"].startswith("Schedule(cut ")
    assert shown["ExpertMemory"].startswith("ExpertMemory(")
    assert max(map(len, shown.values())) < 250
    assert not [words for words in shown.values() if " object at 0x" in words]
