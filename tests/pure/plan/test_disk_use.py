"""Expected reads from the disk, and the limit of tokens per second that follows from them."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation import simulate, synthetic_trace
from offload.routing.routing import HitCurve
from offload.times.disk import DiskUse
from offload.times.hits import Sharing
from offload.times.table import CostTable, DecodeTime, Way
from offload.times.work import ModelWork, WeightWork
from specdec.costs.profile import CostProfile
from specdec.policies.throughput import Throughput

GIB = 1 << 30
# A model of 40 layers with 256 experts of 25.6 MiB, about 250 GiB of experts.
WORK = ModelWork(
    n_layers=40, dense=WeightWork(), head=WeightWork(), n_expert_layers=40,
    expert=WeightWork(GIB / 40), n_experts=256, n_used=8,
)  # fmt: skip
USE = DiskUse(WORK, Sharing(), 64 * GIB, 5e9)


def test_a_decode_reads_what_is_not_in_memory() -> None:
    assert USE.all_bytes == pytest.approx(256 * GIB)
    assert USE.share() == 0.25
    used_bytes = 40 * 8 * GIB / 40
    assert 0 < USE.disk_bytes(1) < used_bytes
    assert USE.disk_s() == USE.disk_bytes(1) / 5e9
    assert replace(USE, memory_bytes=0.0).disk_bytes(1) == pytest.approx(used_bytes)
    assert replace(USE, memory_bytes=256 * GIB).disk_bytes(1) == 0


def test_a_batch_reads_an_expert_once_for_all_its_tokens() -> None:
    times = [USE.disk_s(n) for n in (1, 2, 4, 8)]
    assert times == sorted(times)
    assert times[3] < 8 * times[0]


@given(
    st.integers(1, 200), st.integers(1, 200), st.floats(0.0, 256.0), st.sampled_from((0.0, 1e-3))
)
def test_a_batch_never_takes_longer_than_two_batches_of_its_tokens(
    one: int, other: int, memory_gib: float, token_s: float
) -> None:
    use = replace(USE, memory_bytes=memory_gib * GIB)
    both, apart = (
        sum(use.with_reads(token_s * n, n) for n in sizes)
        for sizes in ((one + other,), (one, other))
    )
    assert both <= apart * (1 + 1e-9) + 1e-9
    assert use.disk_s(one) <= use.disk_s(one + other) * (1 + 1e-9)


def test_more_memory_never_means_more_reads() -> None:
    for n in (1, 9, 10, 64, 512):
        reads = [replace(USE, memory_bytes=gib * GIB).disk_bytes(n) for gib in range(0, 260, 4)]
        assert reads == sorted(reads, reverse=True)


def test_slots_hold_experts_that_memory_need_not() -> None:
    n_slots = 2560  # 64 GiB
    assert replace(USE, sharing=Sharing(n_slots)).share() == 0.5
    resident = replace(USE, sharing=Sharing(0, 20))
    assert resident.all_bytes == pytest.approx(128 * GIB)
    assert resident.share() == 0.5


def test_each_ubatch_of_a_prompt_reads_what_is_missing_once() -> None:
    one = USE.disk_bytes(4096)
    assert one == pytest.approx(192 * GIB, rel=0.01)
    assert USE.prompt_s(8192, 4096) == pytest.approx(2 * one / 5e9)
    assert USE.prompt_s(8192, 512) > 10 * one / 5e9


def test_the_sentence_names_the_bound_and_what_more_memory_brings() -> None:
    words = USE.words(2048)
    assert "GiB at 5 GB/s, so answers have at most" in words
    assert f"at most {1 / USE.disk_s():.2g} tokens/s" in words
    assert USE.more_bytes == 64 * GIB
    with_more = replace(USE, memory_bytes=128 * GIB)
    assert f"({1 / with_more.disk_s():.2g} tokens/s with 64 GiB more memory)." in words
    assert "for every 2048 tokens (--ubatch-size)" in words
    whole = replace(USE, memory_bytes=256 * GIB)
    assert whole.words(512) == "Answers are expected to read nothing from the disk."


def test_drafts_grow_if_batches_wait_for_the_disk() -> None:
    """A batch reads an expert once for all its tokens, so further tokens cost less than the first.

    Without the disk, a batch of n tokens takes nearly as long as n batches of one.
    """
    computing = CostTable(ways={Way.SPLIT: {n: DecodeTime(0.1 + 0.9 * n) for n in range(1, 17)}})
    skewed = HitCurve(((0.125, 0.5), (0.25, 0.6), (1.0, 1.0)), 1000, date(2026, 1, 1))
    slow = replace(USE, work=replace(WORK, hits=skewed, n_used=64), bytes_per_s=1e8)
    lengths = []
    for table in (computing, slow.table(computing)):
        profile = CostProfile(tuple(table.curve(16, (Way.SPLIT,))), 0.01)
        run = simulate(synthetic_trace(3000, seed=1), profile, Throughput(profile))
        lengths.append(run.n_drafted / run.n_rounds)
    assert lengths[1] > 2 * lengths[0]
