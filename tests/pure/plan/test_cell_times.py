"""The price of cells that no running request needs, by the machine model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.synth.published import PublishedFacts
from offload.plan.cell_times import CellTimes
from offload.plan.decision import decide
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.wanted import Wanted
from offload.times.context_memory import ContextOptions
from offload.times.machine import TYPICAL

GIB = 1 << 30


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> PublishedFacts:
    return PublishedFacts(tmp_path_factory.mktemp("headers"))


def times_of(
    title: str,
    headers: PublishedFacts,
    kind: Kind = Kind.GPU,
    *,
    link_bytes_per_s: float = TYPICAL.link_bytes_per_s,
    kv_offload: bool = True,
    n_threads: int = 16,
) -> CellTimes:
    machine = replace(TYPICAL, link_bytes_per_s=link_bytes_per_s)
    device = FoundDevice("GPU0", kind, 24 * GIB, machine=machine)
    options = ContextOptions(131072, n_ubatch=2048, n_sequences=4, kv_offload=kv_offload)
    wanted = Wanted(options, n_cpu_moe="fit", most_ubatch=2048)
    found = Found((device,), ram_bytes=2048 * GIB)
    return CellTimes(decide(headers[title], found, wanted), n_threads)


def test_cells_cost_in_proportion_in_decodes_and_in_each_ubatch_of_a_prompt(
    headers: PublishedFacts,
) -> None:
    times = times_of("DeepSeek-R1", headers)
    one_s = times.attention_s(30_000, 1)
    assert times.attention_s(90_000, 1) == pytest.approx(3 * one_s, rel=0.02)
    ubatch_s = times.attention_s(30_000, 2048)
    assert ubatch_s > 20 * one_s
    assert times.attention_s(30_000, 3 * 2048 + 1) == pytest.approx(3 * ubatch_s + one_s)
    assert times.attention_s(0, 2048) == 0.0


def test_cells_cost_nothing_in_a_block_that_others_use_too(headers: PublishedFacts) -> None:
    times = times_of("DeepSeek-R1", headers)
    assert times.rent_s(60, 30, 1) == times.rent_s(512, 255, 1) == 0.0
    assert times.rent_s(257, 1, 1) == times.rent_s(512, 256.5, 1) == times.attention_s(256, 1)
    assert times.rent_s(60_000, 30_000, 7) == pytest.approx(times.attention_s(30_000, 7), rel=0.02)


def test_a_token_reads_the_cells_bytes_at_the_caches_rate(headers: PublishedFacts) -> None:
    """Keys and values of 4 heads of 128 in f16, in each of 48 layers."""
    size_bytes = 30_000 * 48 * 4 * 128 * 2 * 2
    read_s = size_bytes / (TYPICAL.vram_bytes_per_s * 0.375)
    found_s = times_of("Qwen3-30B-A3B", headers).attention_s(30_000, 1)
    assert found_s == pytest.approx(read_s, rel=0.02)


def test_layers_with_windows_pass_over_a_window_of_each_conversation(
    headers: PublishedFacts,
) -> None:
    """Half of gpt-oss's layers have windows of 128 tokens, which do not grow with the text."""
    times = times_of("gpt-oss-120b", headers)
    short_s, long_s, longer_s = (times.attention_s(n, 1) for n in (256, 25_600, 51_200))
    grows_s = longer_s - long_s
    assert 0.0 < long_s - grows_s < 0.02 * long_s, "all that windows add"
    assert short_s == pytest.approx(grows_s / 100 + (long_s - grows_s), rel=0.02)


def test_a_processor_takes_longer_than_a_gpu(headers: PublishedFacts) -> None:
    gpu, cpu = (times_of("gpt-oss-120b", headers, kind) for kind in (Kind.GPU, Kind.CPU))
    assert cpu.attention_s(30_000, 2048) > 10 * gpu.attention_s(30_000, 2048)


def test_a_processor_takes_half_as_long_with_twice_the_threads(headers: PublishedFacts) -> None:
    few_s, many_s = (
        times_of("DeepSeek-R1", headers, Kind.CPU, n_threads=n).attention_s(30_000, 2048)
        for n in (8, 16)
    )
    assert few_s == pytest.approx(2 * many_s, rel=0.02)


def test_cells_count_in_whole_steps_of_the_library(headers: PublishedFacts) -> None:
    times = times_of("Qwen3-30B-A3B", headers)
    one_s, more_s = times.attention_s(1, 1), times.attention_s(257, 1)
    assert 0.0 < one_s == times.attention_s(256, 1)
    assert more_s == times.attention_s(512, 1) == pytest.approx(2 * one_s, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "kv_offload", "bytes_per_s"),
    [(Kind.GPU, True, 5e8), (Kind.GPU, False, 2e9), (Kind.CPU, True, 2e9)],
)
def test_a_state_in_device_memory_moves_no_faster_than_the_link(
    kind: Kind, kv_offload: bool, bytes_per_s: float, headers: PublishedFacts
) -> None:
    slow = times_of("Qwen3-30B-A3B", headers, kind, link_bytes_per_s=5e8, kv_offload=kv_offload)
    assert slow.copy_bytes_per_s == bytes_per_s
    fast = times_of("Qwen3-30B-A3B", headers, kind, kv_offload=kv_offload)
    assert fast.copy_bytes_per_s == 2e9
