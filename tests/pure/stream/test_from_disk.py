"""Layers whose experts are in slots, in memory and on the disk: the division and its times."""

from __future__ import annotations

import random

import numpy as np
import pytest

from offload.schedule.division import HIT, HOST, LATE, STREAMED, SplitCosts, split_pairs
from offload.schedule.from_disk import split_from_disk, stay_late

N_EXPERTS = 32


def costs_of(host_s: float, device_s: float, copy_s: float) -> SplitCosts:
    rows = np.arange(5.0)
    return SplitCosts(host_s * rows, device_s * rows, 0.0, 0.0, copy_s)


def end_s(
    rows: dict[int, int], kinds: dict[int, int], late: list[int], costs: SplitCosts, read_s: float
) -> float:
    """Return the seconds until a layer ends, computed one expert after the other."""
    host, device = float(costs.host_s[1]), float(costs.device_s[1])
    cpu_s = sum(host * n for e, n in rows.items() if kinds[e] == HOST)
    for at, expert in enumerate(late, 1):
        cpu_s = max(cpu_s, at * read_s) + host * rows[expert]
    on_device = [e for e in rows if kinds[e] in (HIT, STREAMED)]
    n_copies = sum(kinds[e] == STREAMED for e in on_device)
    device_s = n_copies * costs.copy_s + sum(device * rows[e] for e in on_device)
    return max(cpu_s, device_s)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_number_of_copies_ends_sooner(seed: int) -> None:
    chance = random.Random(seed)
    n_used = chance.choice([4, 8])
    ids = np.array([chance.sample(range(N_EXPERTS), n_used)], np.int32)
    used = ids[0].tolist()
    places = {e: chance.choice(["slot", "memory", "disk"]) for e in used}
    resident = np.array([places.get(e) == "slot" for e in range(N_EXPERTS)])
    late = [e for e in used if places[e] == "disk"]
    misses = sorted(e for e in used if places[e] == "memory")
    host_s, device_s, copy_s = (chance.uniform(0.2, 3) for _ in range(3))
    costs, read_s = costs_of(host_s, device_s / 10, copy_s), chance.uniform(0.5, 5)
    rows = dict.fromkeys(used, 1)
    best = min(
        end_s(
            rows,
            {e: HIT for e in used if places[e] == "slot"}
            | dict.fromkeys(late, LATE)
            | {e: STREAMED if n < n_streamed else HOST for n, e in enumerate(misses)},
            late, costs, read_s,
        )
        for n_streamed in range(len(misses) + 1)
    )  # fmt: skip
    waiting = split_pairs(ids, resident, costs)
    waiting_s = len(late) * read_s + max(waiting.cpu_s, waiting.device_s)
    found = split_from_disk(ids, resident, late, costs, read_s)
    if found is None:
        assert waiting_s <= best + 1e-9
        return
    assert best <= waiting_s + 1e-9
    kinds = {e: int(found.kind[e]) for e in used}
    assert [e for e in used if kinds[e] == LATE] == late
    assert all((kinds[e] == HIT) == (places[e] == "slot") for e in used)
    assert end_s(rows, kinds, late, costs, read_s) == pytest.approx(best)
    assert max(found.cpu_s, found.device_s) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(40))
def test_a_layer_ends_with_the_latest_of_disk_link_cpu_and_device(seed: int) -> None:
    """Here the CPU computes an expert in less than a fifth of the time that its read takes."""
    chance = random.Random(seed)
    ids = np.array([chance.sample(range(N_EXPERTS), 8) for _ in range(4)], np.int32)
    used = np.unique(ids).tolist()
    resident = np.zeros(N_EXPERTS, np.bool_)
    resident[chance.sample(used, len(used) // 3)] = True
    misses = [e for e in used if not resident[e]]
    late = chance.sample(misses, max(4, len(misses) // 2))
    read_s, copy_s = 1.0, chance.uniform(0.1, 0.4)
    costs = costs_of(chance.uniform(0.02, 0.1), chance.uniform(0.001, 0.01), copy_s)
    found = split_from_disk(ids, resident, late, costs, read_s)
    assert found is not None
    rows = np.bincount(ids.ravel(), minlength=N_EXPERTS)
    n_copies = int(((found.kind == STREAMED) & (rows > 0)).sum())
    on_cpu = rows[(rows > 0) & ((found.kind == HOST) | (found.kind == LATE))]
    latest_s = max(len(late) * read_s, n_copies * copy_s, on_cpu.sum() * costs.host_s[1])
    assert max(found.cpu_s, found.device_s) <= 1.1 * latest_s


def test_a_slow_cpu_waits_for_all_experts_and_lets_the_link_copy_them() -> None:
    ids = np.arange(8, dtype=np.int32)[None]
    resident = np.zeros(N_EXPERTS, np.bool_)
    assert split_from_disk(ids, resident, [0, 1, 2], costs_of(9.0, 0.01, 0.1), 1.0) is None
    assert split_from_disk(ids, resident, [0, 1, 2], costs_of(0.1, 0.01, 0.1), 1.0) is not None


def test_experts_that_stay_are_computed_when_they_arrive() -> None:
    resident = np.array([True, False, False, True])
    assert stay_late(resident, [2]).tolist() == [HIT, HOST, LATE, HIT]
