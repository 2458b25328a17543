"""The machine model: limits of a batch's speed, hits of a cache, and the crossover of streaming."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.decode import SMALL_BATCH
from offload.times.decodes import best_s, cpu_s, hybrid_s, streamed_s
from offload.times.first_table import modelled_crossover
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL, Machine, ram_seen, vram_seen
from offload.times.prompts import prefill_s
from offload.times.work import ModelWork, WeightWork

# Numbers from the header of DeepSeek-R1 as Q4_K_M.
R1 = ModelWork(
    n_layers=61,
    dense=WeightWork(151e6, 250e6),
    head=WeightWork(760e6, 927e6),
    n_expert_layers=58,
    expert=WeightWork(26.5e6, 44.0e6),
    n_experts=256,
    n_used=8,
)
RING = Sharing(n_slots=400)


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_more_tokens_never_take_less_time(n: int, more: int) -> None:
    # From the size on at which all experts are copied ahead, no layer waits for its ids.
    waits_s = R1.n_expert_layers * TYPICAL.per_batch_wait_s
    for side, saved_s in ((cpu_s, 0.0), (streamed_s, 2 * waits_s)):
        later_s = side(TYPICAL, R1, RING, n + more)
        # Passes, which larger batches have, compute a group of experts while the next is copied.
        gain = 0.02 if n <= SMALL_BATCH < n + more else 1e-9
        assert side(TYPICAL, R1, RING, n) <= later_s * (1 + gain) + saved_s


def test_a_token_on_the_cpu_is_bound_by_its_memory() -> None:
    experts_s = 58 * 8 * R1.expert.size_bytes / TYPICAL.ram_bytes_per_s
    assert experts_s < cpu_s(TYPICAL, R1, RING, 1) < 1.2 * experts_s
    twice = replace(TYPICAL, ram_bytes_per_s=2 * TYPICAL.ram_bytes_per_s)
    assert cpu_s(twice, R1, RING, 1) < 0.6 * cpu_s(TYPICAL, R1, RING, 1)


def test_a_prompt_streamed_is_bound_by_the_link() -> None:
    every_expert_s = 58 * 256 * R1.expert.size_bytes / TYPICAL.link_bytes_per_s
    assert 0.97 * every_expert_s < streamed_s(TYPICAL, R1, RING, 4096) < 1.05 * every_expert_s
    # Streamed weights are copied once for each ubatch, whatever its size.
    small = prefill_s(TYPICAL, R1, RING, 8192, 512)
    assert small == pytest.approx(16 / 2 * prefill_s(TYPICAL, R1, RING, 8192, 4096), rel=0.1)


@pytest.mark.parametrize("n_tokens", [512, 4096])
def test_slots_for_two_groups_stream_a_layer_of_any_size(n_tokens: int) -> None:
    whole = streamed_s(TYPICAL, R1, Sharing(2 * 256), n_tokens)
    assert streamed_s(TYPICAL, R1, Sharing(32), n_tokens) < 1.08 * whole
    assert streamed_s(TYPICAL, R1, Sharing(8), n_tokens) < 1.5 * whole


@given(st.integers(65, 4000), st.integers(8, 511), st.integers(8, 511))
def test_more_slots_hardly_ever_make_passes_slower(n: int, n_slots: int, more: int) -> None:
    fewer, most = sorted((n_slots, more))
    s = [float(streamed_s(TYPICAL, R1, Sharing(slots), n)) for slots in (fewer, most)]
    assert s[1] <= s[0] * 1.01


def test_a_cache_makes_small_batches_worth_streaming() -> None:
    quarter = Sharing(n_slots=58 * 256 // 4)
    assert streamed_s(TYPICAL, R1, quarter, 1) < cpu_s(TYPICAL, R1, quarter, 1)
    assert streamed_s(TYPICAL, R1, RING, 1) > cpu_s(TYPICAL, R1, RING, 1)


@given(st.integers(1, 4000), st.integers(0, 58 * 256), st.integers(0, 58 * 256))
def test_more_slots_never_take_more_time(n: int, n_slots: int, more: int) -> None:
    fewer, most = sorted((n_slots, more))
    if fewer >= (2 * 256 if n > 64 else min(256, 8 * n)):  # passes are another way
        s = [float(streamed_s(TYPICAL, R1, Sharing(slots), n)) for slots in (fewer, most)]
        assert s[1] <= s[0] * (1 + 1e-9)


def test_a_prompt_keeps_whole_layers_between_ubatches() -> None:
    layer_s = 256 * R1.expert.size_bytes / TYPICAL.link_bytes_per_s
    none, three, five = (float(streamed_s(TYPICAL, R1, Sharing(256 * n), 4096)) for n in (1, 3, 5))
    assert 1.01 * none >= three, "the slots of three layers let all others pass"
    assert three - five == pytest.approx(2 * layer_s, rel=0.01)


# -- waits for the host


@given(st.integers(1, 8192), st.integers(0, 57))
def test_with_a_slot_for_each_expert_nothing_is_copied(n_tokens: int, n_resident: int) -> None:
    """Also in batches that use every expert."""
    slow = replace(TYPICAL, link_bytes_per_s=1.0)
    sharing = Sharing((58 - n_resident) * 256, n_resident)
    fast_s, slow_s = (streamed_s(machine, R1, sharing, n_tokens) for machine in (TYPICAL, slow))
    assert slow_s == fast_s


def test_a_decode_that_misses_nothing_does_not_wait_in_each_layer() -> None:
    quarter = Sharing(n_slots=58 * 256 // 4)
    s = {hits: float(streamed_s(TYPICAL, R1, quarter, 1, hits)) for hits in (0.0, 0.999, 1.0)}
    resident = float(streamed_s(TYPICAL, R1, Sharing(n_resident=58), 1))
    assert s[1.0] == pytest.approx(resident)
    copies_s = 58 * 8 * R1.expert.size_bytes / TYPICAL.link_bytes_per_s
    assert s[0.0] - resident == pytest.approx(copies_s + 58 * TYPICAL.per_wait_s)
    share = 1 - 0.999 ** (58 * 8)  # of decodes that miss something
    waits_s = s[0.999] - resident - 0.001 * copies_s
    assert waits_s == pytest.approx(share * 58 * TYPICAL.per_wait_s)


def test_devices_that_share_a_model_wait_once_for_the_host_before_and_after_a_decode() -> None:
    host = replace(TYPICAL, per_decode_s=1.0, per_new_layer_s=1e-3)
    none = replace(TYPICAL, per_decode_s=0.0, per_new_layer_s=0.0)
    front = replace(R1, n_layers=30, n_expert_layers=27, head=WeightWork())
    last = replace(R1, n_layers=31, n_expert_layers=31)
    for n, expected_s in ((1, 1.0), (4, 1.0 + 61e-3)):
        added_s = sum(
            cpu_s(host, its, RING, n) - cpu_s(none, its, RING, n) for its in (front, last)
        )
        assert added_s == pytest.approx(expected_s), "new sizes build each layer's graph anew"


# -- rates


def test_rates_seen_are_shares_of_the_data_sheet() -> None:
    sheet = 100e9
    two, four, twelve = (ram_seen(sheet, n)[0] for n in (2, 4, 12))
    assert two > four > twelve > ram_seen(sheet, 24, n_sockets=2)[0]
    for n_channels in (2, 4, 8, 12):
        cpu, together = ram_seen(sheet, n_channels)
        assert cpu <= together < sheet
    assert vram_seen(sheet) < sheet


def test_a_split_reads_misses_at_the_rate_of_cpu_and_copies_together() -> None:
    slow = replace(TYPICAL, link_bytes_per_s=1e12, ram_bytes_per_s=50e9)
    both = replace(slow, shared_ram_bytes_per_s=70e9)
    none, of_all = Sharing(), 58 * R1.union(1) * R1.expert.size_bytes
    saved_s = hybrid_s(slow, R1, none, 1, 0.0) - hybrid_s(both, R1, none, 1, 0.0)
    assert saved_s == pytest.approx(of_all / 50e9 - of_all / 70e9)


# -- the context


def test_a_long_context_slows_decodes() -> None:
    cache = WeightWork(2.3e9, 61 * 32_768 * 128 * (576 + 512))
    deep = replace(R1, context=cache)
    attention_s = 2 * cache.n_weights / (0.7 * TYPICAL.gpu_flops)
    added_s = cpu_s(TYPICAL, deep, RING, 1) - cpu_s(TYPICAL, R1, RING, 1)
    assert added_s == pytest.approx(attention_s), "MLA's decodes are bound by arithmetic"
    few_heads = replace(R1, context=replace(cache, n_weights=cache.n_weights / 100))
    added_s = cpu_s(TYPICAL, few_heads, RING, 1) - cpu_s(TYPICAL, R1, RING, 1)
    assert added_s == pytest.approx(2.3e9 / (0.375 * TYPICAL.vram_bytes_per_s))


# -- split layers


@given(
    st.integers(1, 64),
    st.integers(0, 14_000),
    st.floats(0.0, 1.0),
    st.floats(1e9, 1e12),
    st.floats(1e9, 1e12),
)
def test_a_split_is_never_behind_the_cpu_alone_and_its_misses_all_leave_ram(
    n: int, n_slots: int, hits: float, link: float, ram: float
) -> None:
    machine = replace(TYPICAL, link_bytes_per_s=link, ram_bytes_per_s=ram)
    sharing = Sharing(n_slots)
    split_s = hybrid_s(machine, R1, sharing, n, hits)
    adding_s = R1.n_expert_layers * (machine.per_split_s - machine.per_switch_s)
    assert split_s <= cpu_s(machine, R1, sharing, n) * (1 + 1e-9) + adding_s
    misses_s = 58 * (1 - hits) * R1.union(n) * R1.expert.size_bytes / ram
    assert split_s >= misses_s * (1 - 1e-9)
    assert best_s(machine, R1, sharing, n, hybrid=True) <= best_s(machine, R1, sharing, n)


# -- the crossover


@pytest.mark.parametrize(
    "machine",
    [
        TYPICAL,
        Machine(link_bytes_per_s=12e9),
        Machine(ram_bytes_per_s=400e9, cpu_flops=4e12),
        Machine(link_bytes_per_s=50e9, vram_bytes_per_s=1.8e12, gpu_flops=200e12),
    ],
)
def test_the_modelled_crossover_is_where_streaming_begins_to_win(machine: Machine) -> None:
    n = modelled_crossover(machine, R1, RING)
    assert n is not None
    assert streamed_s(machine, R1, RING, n) <= cpu_s(machine, R1, RING, n)
    assert streamed_s(machine, R1, RING, n - 1) > cpu_s(machine, R1, RING, n - 1)
