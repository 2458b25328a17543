"""Slots are sized by the device memory left after a warm-up, and reduced if they do not fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload import probe as probing
from offload.decode import Batch
from offload.device import DeviceChoice, start_devices
from offload.engine import EngineOptions, open_engine
from offload.errors import DoesNotFit
from offload.ggml.backend import Device
from offload.ggml.context import Context
from offload.ggml.tensor import Buffer
from offload.model_file import read_facts
from offload.opening.opened import Opening
from offload.plan.placement import LEAST_FREE_BYTES, MARGIN_BYTES, Plan, PlanRequest, make_plan
from offload.store.store import Store
from offload.times.context_memory import ContextOptions, context_memory
from offload.times.min_batch import MinBatch

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    sizes = {"n_layer": 8, "n_embd": 256, "n_ff_exp": 256, "n_expert": 16}
    return write_preset("deepseek-v3", models / "sized.gguf", seed=3, **sizes)


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    return make_plan(read_facts(model), PlanRequest(budget_bytes=12 * MIB))


# -- the arithmetic


# -- an engine on a device that counts


class CountingDevice:
    """A simulated device that reports its memory in use, as a GPU does: weights, context and
    slots."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total_bytes: int) -> None:
        self.total_bytes, self.in_use, self.most_slots_bytes = total_bytes, 0, 1 << 60
        self.loaded_bytes = 0
        allocate, close = Device.allocate, Buffer.close
        sizes: dict[int, int] = {}

        def counted(device: Device, size_bytes: int, what: str) -> Buffer:
            if "slots" in what and self.in_use + size_bytes > self.most_slots_bytes:
                raise DoesNotFit(f"{what}: refused")
            buffer = allocate(device, size_bytes, what)
            sizes[id(buffer)] = size_bytes
            self.in_use += size_bytes
            return buffer

        def closed(buffer: Buffer) -> None:
            self.in_use -= sizes.pop(id(buffer), 0)
            close(buffer)

        def free(_: Device) -> tuple[int, int]:
            return self.total_bytes - self.in_use - self.loaded_bytes, self.total_bytes

        def chosen(*wanted: Any, **named: Any) -> tuple[DeviceChoice, ...]:
            return tuple(replace(c, on_gpu=True) for c in start_devices(*wanted, **named))

        def unpinned(store: Store, *arguments: Any, **named: Any) -> None:
            _, _, options = arguments
            made(store, *arguments[:2], replace(options, pin_for=None), **named)

        made = Store.__init__
        monkeypatch.setattr(Device, "allocate", counted)
        monkeypatch.setattr(Buffer, "close", closed)
        monkeypatch.setattr(Device, "memory_bytes", free)
        monkeypatch.setattr(probing, "start_devices", chosen)
        monkeypatch.setattr(Store, "__init__", unpinned)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountingDevice:
    return CountingDevice(monkeypatch, 4 * MARGIN_BYTES)


def options(limit_bytes: int | None, n_cpu_moe: int | str = "fit", **changes: Any) -> EngineOptions:
    streaming = Streaming(device_bytes=limit_bytes, n_cpu_moe=n_cpu_moe)  # type: ignore[arg-type]
    named = {"n_ctx": 256, "n_ubatch": 64, "min_batch": MinBatch(1, 1), **changes}
    return engine_options(device="sim", streaming=streaming, **named)


def tokens(n: int) -> list[int]:
    return [(31 * i + 7) % 500 for i in range(n)]


def test_slots_take_what_the_estimate_left_out(model: Path, counting: CountingDevice) -> None:
    facts = read_facts(model)
    context = context_memory(facts, ContextOptions(256, 64)).total_bytes
    limit = make_plan(facts, PlanRequest(budget_bytes=12 * MIB)).resident_bytes + context + 12 * MIB
    warm_up = Opening._warm_up
    taken = working_bytes = 0

    def takes_more(opening: Opening) -> None:
        """Warm up, then report 1 MiB less device memory in use than was estimated."""
        nonlocal taken, working_bytes
        warm_up(opening)
        assert opening.plan is not None
        executors = opening.weights.parts[0].device.executors.values()
        working_bytes = sum(executor.working_bytes for executor in executors)
        taken = opening.plan.resident_bytes + context - MIB
        counting.loaded_bytes = taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opening, "_warm_up", takes_more)
        with open_engine(model, options(limit, n_cpu_moe=99)) as engine:
            assert engine.opened.plan is not None
            assert taken + engine.opened.plan.slot_bytes <= limit
            slot_bytes = sum(p.slot_bytes for p in engine.opened.plan.layout.pools)
            left = limit - taken - engine.opened.plan.slot_bytes - working_bytes
            assert 0 <= left < slot_bytes + 2 * 8192
            expected = engine.sequences.extend(0, tokens(40))
            assert engine.counters().copies > 0
            assert any("after a warm-up of 64 tokens" in note for note in engine.opened.notes)
            held = counting.in_use
            assert held >= engine.opened.plan.slot_bytes
    assert counting.in_use == 0, "closing gives all back"
    with open_engine(model, engine_options(options(None), device="cpu")) as plain:
        assert np.allclose(plain.sequences.extend(0, tokens(40)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, [64]),
        ({"n_sequences": 2, "most_each": 1}, [64]),
        ({"n_sequences": 4, "n_ctx": 1024, "kv_unified": False, "n_ubatch": 600}, [200] * 3),
    ],
)
def test_a_warm_up_computes_as_many_tokens_as_the_texts_of_all_slots_may_have_in_a_ubatch(
    changes: dict[str, Any], sizes: list[int], model: Path, counting: CountingDevice
) -> None:
    facts = read_facts(model)
    named = {"n_ubatch": 64, "n_ctx": 256, **changes, "n_batch": 1024}
    context = context_memory(facts, ContextOptions(**named)).total_bytes
    decode, decoded = Context.decode, list[Counter[Any]]()

    def noted(its: Context, asked: Batch) -> Any:
        decoded.append(Counter(asked.sequences))
        return decode(its, asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "decode", noted)
        with open_engine(model, options(facts.size_bytes + context - MIB, **named)) as engine:
            assert not any(map(engine.sequences.length, range(named.get("n_sequences", 1))))
            assert engine.opened.context.cells.n_used == 0
    assert [*decoded[0].values()] == sizes
    assert [*decoded[1].values()] == [1]


def test_a_gpu_keeps_some_memory_free_whatever_is_asked_for(
    model: Path, counting: CountingDevice
) -> None:
    facts = read_facts(model)
    context = context_memory(facts, ContextOptions(256, 64)).total_bytes
    usable = facts.size_bytes + context - MIB
    counting.total_bytes = usable + LEAST_FREE_BYTES
    with open_engine(model, options(counting.total_bytes)) as engine:
        plan = engine.opened.plan
        assert plan is not None
        assert plan.streamed
        assert plan.resident_bytes + plan.reserve_bytes + plan.slot_bytes <= usable
        assert any("512 MiB stay free for its driver" in reason for reason in plan.reasons)
    with open_engine(model, options(usable)) as engine:
        assert engine.opened.plan is not None
        assert not any("stay free" in reason for reason in engine.opened.plan.reasons)


def test_a_refusal_leaves_fewer_slots_and_a_working_engine(
    model: Path, counting: CountingDevice
) -> None:
    facts = read_facts(model)
    limit = facts.size_bytes + context_memory(facts, ContextOptions(256, 64)).total_bytes - MIB
    counting.most_slots_bytes = 3 * MIB
    with open_engine(model, options(limit)) as engine:
        assert engine.opened.plan is not None
        assert 0 < engine.opened.plan.slot_bytes <= 3 * MIB
        assert np.isfinite(engine.sequences.extend(0, tokens(40))).all()
    assert counting.in_use == 0


def test_slots_taken_without_a_warm_up_are_fewer_if_the_device_refuses(
    model: Path, counting: CountingDevice
) -> None:
    facts = read_facts(model)
    limit = facts.size_bytes + context_memory(facts, ContextOptions(256, 64)).total_bytes - MIB
    with open_engine(model, options(limit, n_cpu_moe=99)) as engine:
        (part,) = engine.opened.weights.parts
        assert part.plan.slot_bytes > 3 * MIB
        expected = engine.sequences.extend(0, tokens(40))
        counting.most_slots_bytes = 3 * MIB
        part.builder.take_slots(part.plan, part.device)
        assert "the device refused the" in engine.opened.notes[-1]
        engine.sequences.rewind(0, 0)
        assert np.array_equal(engine.sequences.extend(0, tokens(40)), expected)
    assert counting.in_use == 0


def test_a_device_without_any_room_is_refused_and_everything_given_back(
    model: Path, counting: CountingDevice
) -> None:
    facts = read_facts(model)
    limit = facts.size_bytes + context_memory(facts, ContextOptions(256, 64)).total_bytes - MIB
    counting.most_slots_bytes = 1000
    with pytest.raises(DoesNotFit, match="refused"):
        open_engine(model, options(limit))
    assert counting.in_use == 0
