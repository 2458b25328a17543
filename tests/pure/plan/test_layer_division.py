"""The machine model divides a layer as runs do, for batches of any size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.decode import SMALL_BATCH
from offload.schedule.division import HOST, SplitCosts, split_pairs
from offload.schedule.passes import MOST_HOST_PAIRS
from offload.times.decodes import best_s, cpu_s, divided, hybrid_s, streamed_s
from offload.times.first_table import modelled
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL
from offload.times.prompts import prefill_s
from offload.times.table import Way
from offload.times.work import ModelWork, WeightWork

R1 = ModelWork(
    61, WeightWork(151e6, 250e6), WeightWork(760e6, 927e6), 58, WeightWork(26.5e6, 44.0e6), 256, 8
)
SLOTS = Sharing(600)
LINKS = (3e9, 12e9, 25e9, 50e9)


@given(st.sampled_from(LINKS), st.sampled_from((20e9, 63e9, 200e9)), st.integers(1, 5), st.data())
def test_it_divides_as_split_layers_do(
    link: float, ram: float, rows: int, data: st.DataObject
) -> None:
    """All experts have `rows` rows. A fluid division differs from whole experts by one."""
    machine = replace(TYPICAL, link_bytes_per_s=link, ram_bytes_per_s=ram)
    n_pieces = 64
    resident = np.zeros(n_pieces, bool)
    resident[: data.draw(st.integers(0, n_pieces))] = True
    # Each of the tokens uses the same experts, so that all have equally many rows.
    ids = np.tile(np.arange(n_pieces, dtype=np.int32), (rows, 1))
    of_rows = np.arange(rows + 1)
    host_s = R1.expert.cpu_seconds(machine, of_rows) * (of_rows > 0)
    device_s = R1.expert.seconds(machine.vram_bytes_per_s, machine.gpu_flops, of_rows)
    costs = SplitCosts(
        host_s,
        device_s * (of_rows > 0),
        0.0,
        0.0,
        R1.expert.size_bytes / link,
        kinds=(1 / 64,) * 64,
    )
    n_host = int((split_pairs(ids, resident, costs).kind == HOST).sum())
    work = replace(R1, n_experts=n_pieces, n_used=n_pieces)
    its = divided(machine, work, SLOTS, rows, float(resident.mean()))
    assert abs(float(its.on_cpu) - n_host) <= 2.0
    assert float(its.in_slots) == pytest.approx(resident.sum())
    assert float(its.in_slots + its.over_link + its.on_cpu) == pytest.approx(n_pieces)


@given(st.integers(1, 8192), st.sampled_from(LINKS), st.integers(1, 14848))
def test_a_division_has_all_experts_and_no_negative_number(
    n_tokens: int, link: float, n_slots: int
) -> None:
    machine = replace(TYPICAL, link_bytes_per_s=link)
    its = divided(machine, R1, Sharing(n_slots), n_tokens)
    counts = [float(n) for n in (its.in_slots, its.over_link, its.on_cpu)]
    assert min(counts) >= -1e-9
    assert sum(counts) == pytest.approx(float(R1.union(n_tokens)))
    rows = n_tokens * R1.n_used / float(R1.union(n_tokens))
    if n_tokens > SMALL_BATCH:
        assert counts[2] * rows <= MOST_HOST_PAIRS * (1 + 1e-9)


@pytest.mark.parametrize("link", LINKS)
def test_one_function_gives_the_table_and_the_times_of_prompts(link: float) -> None:
    machine = replace(TYPICAL, link_bytes_per_s=link)
    table = modelled(machine, R1, SLOTS, 4096, splits=True)
    assert set(table.ways[Way.SPLIT]) == set(table.ways[Way.IN_PLACE])
    for n, entry in table.ways[Way.SPLIT].items():
        assert entry.seconds == pytest.approx(float(hybrid_s(machine, R1, SLOTS, n)))
        best = float(best_s(machine, R1, SLOTS, n, hybrid=True))
        assert float(prefill_s(machine, R1, SLOTS, n, n, hybrid=True)) == pytest.approx(best)
    several = modelled(machine, R1, SLOTS, 4096, splits=True, shares_prompts=False)
    assert max(several.ways[Way.SPLIT]) == SMALL_BATCH


@pytest.mark.parametrize("link", LINKS)
def test_times_do_not_jump_where_passes_begin(link: float) -> None:
    machine = replace(TYPICAL, link_bytes_per_s=link)
    sizes = np.arange(48, 128)
    seconds = best_s(machine, R1, SLOTS, sizes, hybrid=True)
    ratios = seconds[1:] / seconds[:-1]
    assert ratios.max() < 1.1
    assert ratios.min() > 0.9


def test_arrays_give_the_times_of_each_size() -> None:
    sizes = np.array([1, 8, 64, 65, 512, 4096])
    for seconds in (hybrid_s, streamed_s, cpu_s):
        each = [float(seconds(TYPICAL, R1, SLOTS, n)) for n in sizes.tolist()]
        assert np.allclose(seconds(TYPICAL, R1, SLOTS, sizes), each)
