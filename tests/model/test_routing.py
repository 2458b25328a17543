"""Recording what routers choose while a model runs changes no result."""

from __future__ import annotations

import numpy as np
import pytest
from budgets import limited
from numpy.typing import NDArray
from player_calls import played_layers, reading

from lab.options import Streaming, engine_options
from offload.engine import Engine, open_engine
from offload.ggml.memory import HostRange
from offload.stream.executor import Executor
from offload.times.min_batch import MinBatch
from specoffload.config.resolution import demo_file

TARGET = demo_file("target.gguf")


def opened(*, record: bool, hybrid: bool) -> Engine:
    streaming = Streaming(hybrid=hybrid, record_routing=record)
    streaming = limited(TARGET, streaming, "half")
    options = engine_options(
        device="sim", streaming=streaming, min_batch=MinBatch(1, 1), n_ctx=256, n_ubatch=128
    )
    return open_engine(TARGET, options)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[NDArray[np.int32]]]:
    """All ids that were read, by layer."""
    found: dict[int, list[NDArray[np.int32]]] = {}
    read_ids = Executor._read_ids

    def noted(executor: Executor, step: object, *rest: object) -> NDArray[np.int32]:
        ids = read_ids(executor, step, *rest)  # type: ignore[arg-type]
        found.setdefault(step.layer, []).append(np.array(ids))  # type: ignore[attr-defined]
        return ids

    played = played_layers(monkeypatch)

    def seen(tensor: int, position: int) -> None:
        for layer in [layer for layer in played if layer.ids_at == position]:
            memory = HostRange(position, 4 * layer.n_tokens * layer.ids_stride)
            ids = memory.array().view(np.int32).reshape(layer.n_tokens, -1)[:, : layer.n_used]
            found.setdefault(layer.layer, []).append(ids.copy())

    reading(monkeypatch, lambda _: None, seen)
    monkeypatch.setattr(Executor, "_read_ids", noted)
    return found


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_routers_chose_for_small_batches_is_recorded(
    hybrid: bool, read: dict[int, list[NDArray[np.int32]]]
) -> None:
    with opened(record=True, hybrid=hybrid) as engine:
        engine.sequences.extend(0, range(1, 5), n_logits=4)
        assert engine.opened.routing.recorded() == {}
        assert engine.counters().n_recorded == 0, "off until it is turned on"
        engine.opened.routing.is_on = True
        read.clear()
        for n in (1, 1, 4):
            engine.sequences.extend(0, range(10, 10 + n), n_logits=n)
        with engine.opened.routing.paused():
            engine.build_anew()
        expected = {layer: np.concatenate(ids[:3]) for layer, ids in read.items()}
        recorded = engine.opened.routing.recorded()
        assert recorded.keys() == expected.keys()
        for layer, ids in expected.items():
            assert recorded[layer].tolist() == ids.tolist()
        assert engine.counters().n_recorded == 6 * len(expected)
        # Prompts are not recorded. Their last layer computes one token.
        engine.sequences.extend(0, range(20, 40), n_logits=1)
        engine.sequences.extend(0, range(20, 120), n_logits=1)
        assert engine.opened.routing.n_tokens == 6


def test_recording_changes_no_bit_and_off_records_nothing() -> None:
    logits = []
    for record in (False, True):
        with opened(record=record, hybrid=True) as engine:
            engine.opened.routing.is_on = True
            rows = [engine.sequences.extend(0, [7 + i], n_logits=1) for i in range(8)]
            logits.append(np.concatenate(rows))
            assert (engine.counters().n_recorded > 0) == record
            assert (engine.opened.routing.n_tokens == 8) == record
    assert np.array_equal(logits[0], logits[1])
