"""The recorder keeps the last tokens of every layer, in order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload.decode import SMALL_BATCH
from offload.routing.routing import N_KEPT, RoutingRecorder


@given(st.lists(st.integers(1, SMALL_BATCH), max_size=60))
def test_the_last_tokens_are_kept_in_order(batches: list[int]) -> None:
    recorder = RoutingRecorder()
    told: list[list[int]] = []
    for n in batches:
        ids = np.arange(2 * len(told), 2 * (len(told) + n), dtype=np.int32).reshape(n, 2) % 30_000
        recorder.layer(7, 2).add(ids)
        told += ids.tolist()
    recorded = recorder.recorded()
    assert recorder.n_tokens == len(told)
    if told:
        assert recorded[7].tolist() == told[-N_KEPT:]
    else:
        assert recorded == {}


def test_layers_are_as_long_as_the_shortest_that_was_told_anything() -> None:
    recorder = RoutingRecorder()
    ids = np.zeros((1, 4), np.int32)
    recorder.layer(2, 4)
    for layer, n in ((0, 5), (1, 3)):
        for _ in range(n):
            recorder.layer(layer, 4).add(ids)
    assert recorder.n_tokens == 3
    assert {layer: rows.shape for layer, rows in recorder.recorded().items()} == {
        0: (3, 4),
        1: (3, 4),
    }
    held = recorder.layer(0, 4)
    recorder.forget()
    assert recorder.recorded() == {}
    held.add(ids + 9)
    assert recorder.recorded()[0].tolist() == [[9, 9, 9, 9]]
