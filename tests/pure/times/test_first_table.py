"""A first start's table is made from the rates of the devices that were found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.synth.published import published_facts
from offload.model import ModelFacts
from offload.plan.decision import decide
from offload.plan.expected_costs import expected_costs
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.layout import Layout
from offload.plan.wanted import Wanted
from offload.times.context_memory import ContextOptions
from offload.times.decodes import hybrid_s, streamed_s
from offload.times.first_table import modelled
from offload.times.machine import TYPICAL, Machine
from offload.times.table import CostTable, Way
from offload.times.work import model_work

GIB = 1 << 30
N_MOST = 512
SLOW = replace(TYPICAL, link_bytes_per_s=3e9, ram_bytes_per_s=20e9)
FAST = replace(TYPICAL, link_bytes_per_s=50e9, ram_bytes_per_s=200e9)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return published_facts("Qwen3-30B-A3B", tmp_path_factory.mktemp("header"))


def layout_of(facts: ModelFacts, *machines: Machine) -> Layout:
    devices = tuple(
        FoundDevice(f"GPU{i}", Kind.GPU, 6 * GIB, machine=machine)
        for i, machine in enumerate(machines)
    )
    wanted = Wanted(
        ContextOptions(4096), n_cpu_moe="fit", plan_for_splits=True, most_ubatch=N_MOST, hybrid=True
    )
    return decide(facts, Found(devices), wanted)


def expected(layout: Layout) -> CostTable:
    return expected_costs(layout, layout.plan, N_MOST)


@pytest.mark.parametrize("machine", [SLOW, TYPICAL, FAST])
def test_every_way_is_expected_at_the_rates_of_the_device(
    machine: Machine, facts: ModelFacts
) -> None:
    layout = layout_of(facts, machine)
    table, work, sharing = expected(layout), model_work(facts), layout.plan.sharing
    assert set(table.ways) == {Way.IN_PLACE, Way.STREAMED, Way.SPLIT}
    assert table.ways == modelled(machine, work, sharing, N_MOST, splits=True).ways
    for way, seconds in ((Way.STREAMED, streamed_s), (Way.SPLIT, hybrid_s)):
        ours, typical = (float(seconds(its, work, sharing, 1)) for its in (machine, TYPICAL))
        assert table.ways[way][1].seconds == pytest.approx(ours)
        assert (ours > typical, ours < typical) == (machine is SLOW, machine is FAST)


def test_the_times_of_several_devices_add_up(facts: ModelFacts) -> None:
    layout = layout_of(facts, SLOW, FAST)
    assert len(layout.local) == 2
    table = expected(layout)
    each = [
        float(streamed_s(its.device.machine, model_work(its.facts), its.plan.sharing, 1))
        for its in layout.local
    ]
    assert len(each) == 2
    assert table.ways[Way.STREAMED][1].seconds == pytest.approx(sum(each))
