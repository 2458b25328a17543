"""Prometheus' own parser reads the page at /metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specoffload.generation.statistics import GenerationStats
from specoffload.server.metrics import Metrics, page_of

STATS = GenerationStats(
    n_prompt_tokens=10,
    n_cached_tokens=4,
    n_tokens=7,
    prefill_s=2.0,
    decode_s=0.5,
    n_rounds=3,
    n_drafted=8,
    n_accepted=4,
    draft_lengths=((0, 1), (4, 2)),
    decisions=(("cost", 2), ("no draft", 1)),
    accepted_by_source=(("draft", 4),),
)


def _samples(metrics: Metrics, engine: Any = None) -> dict[tuple[str, str], float]:
    metrics.of_engine.update(engine or {})
    page = page_of(metrics.families(n_running=1, n_waiting=2, n_parallel=4))
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_an_answer_is_counted_under_llama_servers_names() -> None:
    metrics = Metrics()
    metrics.add(STATS, 4.0)
    metrics.add(STATS, 4.0)
    metrics.n_restarts = 5
    samples = _samples(metrics, {"streamed_bytes": 1000, "hits": 3, "misses": 1})
    for name, value in {
        "llamacpp:prompt_tokens_total": 12,
        "llamacpp:prompt_tokens_cached_total": 8,
        "llamacpp:prompt_seconds_total": 4,
        "llamacpp:tokens_predicted_total": 14,
        "llamacpp:tokens_predicted_seconds_total": 1,
        "llamacpp:n_decode_total": 6,
        "llamacpp:n_tokens_max": 17,
        "llamacpp:prompt_tokens_seconds": 2.5,
        "llamacpp:predicted_tokens_seconds": 14,
        "llamacpp:requests_processing": 1,
        "llamacpp:requests_deferred": 2,
        "llamacpp:spec_decode_num_drafts_total": 4,
        "llamacpp:spec_decode_num_draft_tokens_total": 16,
        "llamacpp:spec_decode_num_accepted_tokens_total": 8,
        "specoffload:internal_streamed_bytes_total": 1000,
        "specoffload:hit_rate": 0.75,
        "specoffload:acceptance_rate": 0.5,
        "specoffload:engine_restarts_total": 5,
        "specoffload:slots": 4,
    }.items():
        assert samples[name, ""] == value, name
    assert samples["specoffload:internal_policy_decisions_total", "cost"] == 4
    assert samples["specoffload:internal_draft_length_total", "4"] == 4
    assert samples["specoffload:internal_accepted_tokens_total", "draft"] == 8


def test_each_of_several_devices_has_its_own_counters() -> None:
    found = _samples(Metrics(), {"copies": 5, "copies of CUDA0": 2, "copies of CUDA1": 3})
    assert found["specoffload:internal_copies_total", ""] == 5
    by_device = {label: n for (name, label), n in found.items() if "device_copies" in name}
    assert sorted(by_device.values()) == [2, 3]
    assert not [name for name, _ in found if "device_misses" in name]


def test_histograms_have_vllms_names_its_label_and_whole_buckets() -> None:
    metrics = Metrics()
    for waited_s, first_s in ((0.0, 0.03), (8.5, 9.0)):
        metrics.add_first_token(first_s)
        metrics.add(replace(STATS, waited_s=waited_s), 2.5 + waited_s)
    page = page_of(metrics.families(n_running=0, n_waiting=0, n_parallel=1, model="m"))
    families = {f.name: f for f in text_string_to_metric_families(page.decode())}
    for name, total_s in {
        "vllm:time_to_first_token_seconds": 9.03,
        "vllm:request_time_per_output_token_seconds": 1 / 7,
        "vllm:request_queue_time_seconds": 8.5,
        "vllm:e2e_request_latency_seconds": 13.5,
    }.items():
        samples = families[name].samples
        assert all(sample.labels["model_name"] == "m" for sample in samples)
        assert [s.value for s in samples if s.name.endswith("_sum")] == [pytest.approx(total_s)]
        counts = [s.value for s in samples if s.name.endswith("_bucket")]
        assert counts == sorted(counts)
        assert counts[-1] == 2
    queued = families["vllm:request_queue_time_seconds"].samples
    below = {s.labels["le"]: s.value for s in queued if s.name.endswith("_bucket")}
    assert (below["0.3"], below["5.0"], below["10.0"]) == (1, 1, 2)


def test_every_name_has_one_of_three_prefixes() -> None:
    page = page_of(Metrics().families(n_running=0, n_waiting=0, n_parallel=1))
    for family in text_string_to_metric_families(page.decode()):
        assert family.name.split(":")[0] in ("llamacpp", "vllm", "specoffload")
