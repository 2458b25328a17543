"""--route-cached on a GPU: its routers choose as the numpy form does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from on_gpu import assert_same, logits, options, slots_for
from routed_choices import SpiedChoices, routing_of, turn_on
from splits import at_random

from offload.device import DeviceChoice
from offload.engine import open_engine
from offload.schedule.cached_choice import RouteOptions
from offload.schedule.splitter import all_on_device
from offload.times.min_batch import NEVER, MinBatch

ROUTE = RouteOptions(1.0, 1)


def test_a_gpus_routers_choose_as_the_numpy_form_does(
    gpu: DeviceChoice, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spied = SpiedChoices(monkeypatch)
    streaming = slots_for(
        moe, "half", hybrid=True, splitter=at_random(1), route=ROUTE, record_routing=True
    )
    never = MinBatch(NEVER, NEVER)
    with open_engine(moe, options(gpu, streaming, min_batch=never, n_ubatch=64)) as engine:
        turn_on(engine)
        logits(engine)
        spied.assert_same(engine)
        assert not routing_of(engine).n_unchanged
    assert spied.n_other > 0, "nothing was preferred"


def test_no_bit_changes_if_every_expert_is_in_a_slot(gpu: DeviceChoice, moe: Path) -> None:
    rows = []
    for route in (RouteOptions(), ROUTE):
        streaming = slots_for(moe, "all", hybrid=True, splitter=all_on_device, route=route)
        never = MinBatch(NEVER, NEVER)
        with open_engine(moe, options(gpu, streaming, min_batch=never)) as engine:
            logits(engine)  # fills the slots
            if route.is_on:
                routing_of(engine).is_on = True
            rows.append(logits(engine))
    assert np.isfinite(rows[0]).all()
    assert_same(gpu, rows[1], rows[0])
