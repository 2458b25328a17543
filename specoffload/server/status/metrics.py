"""The page at /metrics, in Prometheus' text format.

llama-server's names where they mean the same (llama.cpp tools/server/README.md), so that its
dashboards show this server too; ours begin with `specoffload:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specoffload.server.status.delays import Delays
from specoffload.server.status.totals import Totals

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Counters of the copy path and of drafting, by the name of their field.
ENGINE_COUNTERS: Mapping[str, str] = {
    "streamed_bytes": "Bytes of weights copied to the device.",
    "copies": "Copies of weights to the device.",
    "streamed_experts": "Experts copied to the device.",
    "hits": "Uses of a streamed piece that was on the device already.",
    "misses": "Uses of a streamed piece that had to be copied first.",
    "evictions": "Streamed pieces that gave their slot to another.",
    "prefetched_used": "Pieces copied ahead of their use, and used.",
    "prefetched_wasted": "Pieces copied ahead of their use, and evicted unused.",
    "split_layers": "Layers of experts that were split between the CPU and the device.",
    "n_pairs_hit": "Uses of an expert by a token in them, on the device without a copy.",
    "n_pairs_streamed": "Uses of an expert by a token in them, on the device behind a copy.",
    "n_pairs_host": "Uses of an expert by a token in them, on the CPU.",
    "n_nodes_ahead": "Nodes computed while the CPU had experts of their layer under way.",
    "n_promoted": "Experts of such layers that were copied for later, while the link was idle.",
    "n_filled": "Experts that were copied while the first request was awaited.",
    "layers_out_of_order": "Layers of prompts that were read from wherever their experts lay.",
    "split_trials": "Times that batches of a size were tried the other way (--hybrid auto).",
    "split_changes": "Times that batches of a size went over to the other way.",
    "n_recorded": "Tokens of a layer whose experts were recorded, for expected hits.",
    "size_retries": "Decodes of a batch size whose measured time contradicted others.",
    "draft_batches": "Drafts of several answers in one batch.",
    "joint_steps": "Batches of which all draft lengths were chosen together.",
    "joint_changed": "Draft lengths in them that differ from the answer's own choice.",
}


@dataclass(frozen=True)
class Now:
    """The server at the moment of asking; `engine` are the counters of the engine process since it
    was started."""

    totals: Totals
    n_running: int
    n_waiting: int
    n_parallel: int
    n_restarts: int
    n_refused: int = 0
    n_connections_closed: int = 0
    engine: Mapping[str, float] = field(default_factory=dict)
    delays: Delays = field(default_factory=Delays)


class _Page(Collector):
    def __init__(self, now: Now) -> None:
        self._now = now

    def collect(self) -> Iterator[Metric]:
        yield from _theirs(self._now)
        yield from _ours(self._now)


def metrics_page(now: Now) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(now))
    page: bytes = generate_latest(registry)
    return page


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _labelled(
    name: str, text: str, label: str, values: Iterable[tuple[object, float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values:
        family.add_metric([str(key)], value)
    return family


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def _theirs(now: Now) -> Iterator[Metric]:
    t = now.totals
    counters = (
        ("prompt_tokens", "Tokens of prompts that were evaluated.", t.n_prompt_tokens),
        ("prompt_tokens_cached", "Tokens of prompts that were kept.", t.n_cached_tokens),
        ("prompt_seconds", "Time of evaluating prompts.", t.prompt_s),
        ("tokens_predicted", "Tokens generated.", t.n_tokens),
        ("tokens_predicted_seconds", "Time of generating.", t.decode_s),
        ("n_decode", "Rounds of decoding, each of one answer.", t.n_rounds),
        ("spec_decode_num_drafts", "Rounds that drafted.", t.n_drafts),
        ("spec_decode_num_draft_tokens", "Tokens drafted.", t.n_drafted),
        ("spec_decode_num_accepted_tokens", "Tokens drafted and accepted.", t.n_accepted),
    )
    for name, text, value in counters:
        yield _counter(f"llamacpp:{name}", text, value)
    prompt_rate, rate = _ratio(t.n_prefilled, t.prompt_s), _ratio(t.n_tokens, t.decode_s)
    gauges = (
        ("n_tokens_max", "Longest prompt with its answer.", t.n_tokens_max),
        ("prompt_tokens_seconds", "Mean prompt tokens per second.", prompt_rate),
        ("predicted_tokens_seconds", "Mean generated tokens per second of an answer.", rate),
        ("requests_processing", "Requests that are being answered.", now.n_running),
        ("requests_deferred", "Requests that wait.", now.n_waiting),
    )
    for name, text, value in gauges:
        yield _gauge(f"llamacpp:{name}", text, value)


def _ours(now: Now) -> Iterator[Metric]:
    t = now.totals
    counters = (
        ("answers", "Answers that came to their end.", t.n_answers),
        ("draft_steps", "Decodes of the draft model.", t.n_draft_steps),
        ("draft_seconds", "Time of drafting.", t.draft_s),
        ("verify_seconds", "Time of verifying drafts.", t.verify_s),
        ("rollback_seconds", "Time of taking rejected tokens back.", t.rollback_s),
        ("engine_restarts", "Times the engine process was started again.", now.n_restarts),
        ("requests_refused", "Requests that found no place in the queue.", now.n_refused),
        ("connections_closed", "Connections closed to make room.", now.n_connections_closed),
    )
    for name, text, value in counters:
        yield _counter(f"specoffload:{name}", text, value)
    for name, text in ENGINE_COUNTERS.items():
        if name in now.engine:
            yield _counter(f"specoffload:{name}", text, now.engine[name])
    uses = now.engine.get("hits", 0) + now.engine.get("misses", 0)
    gauges = (
        ("acceptance_rate", "Share of drafted tokens accepted.", _ratio(t.n_accepted, t.n_drafted)),
        ("hit_rate", "Share of uses that found their piece on the device.",
         _ratio(now.engine.get("hits", 0), uses)),
        ("slots", "Requests that may run at once.", now.n_parallel),
    )  # fmt: skip
    for name, text, value in gauges:
        yield _gauge(f"specoffload:{name}", text, value)
    yield HistogramMetricFamily(
        "specoffload:token_delay_seconds",
        "Time from the engine's token to its client's socket.",
        buckets=[*now.delays.buckets()],
        sum_value=now.delays.sum_s,
    )
    for name, text, label, values in (
        ("policy_decisions", "Rounds by the reason of their draft length.", "reason", t.decisions),
        ("draft_length", "Rounds by the length of their draft.", "length", t.draft_lengths),
        ("accepted_tokens", "Accepted tokens by drafter.", "drafter", t.accepted_by_source),
    ):
        yield _labelled(f"specoffload:{name}", text, label, sorted(values.items()))
