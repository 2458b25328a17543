"""What a switch does when decodes go the other way for a while."""

from __future__ import annotations

import logging

import pytest

from offload.split.switch import HybridSwitch
from offload.split.watching import Watcher

MANY = 400


def serve(switch: HybridSwitch, watcher: Watcher, split_s: float, old_s: float) -> None:
    for _ in range(MANY):
        watcher.took(1, split_s if switch.splits(1) else old_s)


def test_it_goes_back_where_splitting_is_slower_while_serving_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    switch, n_built = HybridSwitch(), 0

    def build_anew() -> None:
        nonlocal n_built
        n_built += 1

    watcher = Watcher(switch, 64, build_anew)
    with caplog.at_level(logging.WARNING):
        serve(switch, watcher, split_s=2.0, old_s=1.0)
    assert not switch.splits(1)
    assert switch.splits(2), "other sizes are as they were"
    assert n_built > 0
    (said,) = (r.message for r in caplog.records)
    assert said.startswith("--hybrid auto: no layer is split in batches of 1 token from now on")
    assert "2000.0 ms split, 1000.0 ms by --min-batch alone" in said


def test_it_stays_where_splitting_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    switch = HybridSwitch()
    n_split = 0
    watcher = Watcher(switch, 64, lambda: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(MANY):
            n_split += switch.splits(1)
            watcher.took(1, 1.0 if switch.splits(1) else 2.0)
    assert n_split > 0.85 * MANY
    assert not caplog.records


def test_larger_batches_and_models_that_are_not_split_are_left_alone() -> None:
    switch = HybridSwitch(declined="layer 1 is not split")
    watcher = Watcher(switch, 32, lambda: pytest.fail("nothing changes"))
    serve(switch, watcher, 1.0, 1.0)
    switch.declined = ""
    for _ in range(MANY):
        watcher.took(33, 1.0)
    switch.is_active = False  # others are measured
    serve(switch, watcher, 1.0, 1.0)


def test_sizes_of_batches_are_watched_apart(caplog: pytest.LogCaptureFixture) -> None:
    """As on a server: each step has another number of requests and drafts."""
    switch = HybridSwitch(unsplit=frozenset(range(5, 65)))
    watcher = Watcher(switch, 64, lambda: None)
    split_s = {3: 1.0, 4: 2.0, 5: 1.0, 6: 2.0}
    old_s = {3: 1.5, 4: 1.0, 5: 1.5, 6: 1.0}
    with caplog.at_level(logging.WARNING):
        for i in range(6 * MANY):
            n = 3 + i % 4
            watcher.took(n, split_s[n] if switch.splits(n) else old_s[n])
    assert [switch.splits(n) for n in (3, 4, 5, 6)] == [True, False, True, False]
    assert len(caplog.records) == 2
