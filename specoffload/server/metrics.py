"""Counts what a server does, and writes /metrics in Prometheus' text format.

Metrics with the same meaning have llama-server's names (llama.cpp tools/server/README.md), or else
vLLM's with its buckets (https://docs.vllm.ai/en/latest/design/metrics.html), so that their
dashboards work with this server. Names of other metrics begin with `specoffload:`, and those about
the inside of the program with `specoffload:internal_`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from specoffload.generation.statistics import GenerationStats

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
N_DRAFTED = "llamacpp:spec_decode_num_draft_tokens"
_INTERNAL = "specoffload:internal_"

_BOUNDS_S = (
    *(50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 700e-6),
    *(1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7e-3, 10e-3, 20e-3, 50e-3, 0.1, 1.0),
)

# Histograms of requests: name, help, and the bounds of the buckets in seconds.
_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
_PER_TOKEN = "vllm:request_time_per_output_token_seconds"
_QUEUED = "vllm:request_queue_time_seconds"
_WHOLE = "vllm:e2e_request_latency_seconds"
_REQUEST_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    (_FIRST_TOKEN, "Time from a request's arrival to its first token.",
     (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
      20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)),
    (_PER_TOKEN, "Mean time of an answer's tokens, one value for each answer.",
     (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
      20.0, 40.0, 80.0)),
    (_QUEUED, "Time in which a request was neither read nor answered.", _REQUEST_BOUNDS_S),
    (_WHOLE, "Time from a request's arrival to its last token.", _REQUEST_BOUNDS_S),
)  # fmt: skip

# Sums over finished answers: name, help, and the value of one answer.
_SUMS: tuple[tuple[str, str, Callable[[GenerationStats], float]], ...] = (
    ("llamacpp:prompt_tokens", "Prompt tokens that were evaluated.",
     lambda s: s.n_prompt_tokens - s.n_cached_tokens),
    ("llamacpp:prompt_tokens_cached", "Prompt tokens that were cached, and not evaluated again.",
     lambda s: s.n_cached_tokens),
    ("specoffload:prompt_tokens_from_disk", "Cached prompt tokens that were read from the disk.",
     lambda s: s.n_from_disk),
    ("llamacpp:prompt_seconds", "Time of evaluating prompts.", lambda s: s.prefill_s),
    ("llamacpp:tokens_predicted", "Tokens generated.", lambda s: s.n_tokens),
    ("llamacpp:tokens_predicted_seconds", "Time of generating.", lambda s: s.decode_s),
    ("llamacpp:n_decode", "Rounds of decoding, each of one answer.", lambda s: s.n_rounds),
    ("llamacpp:spec_decode_num_drafts", "Rounds that drafted.",
     lambda s: sum(rounds for length, rounds in s.draft_lengths if length > 0)),
    (N_DRAFTED, "Tokens drafted.", lambda s: s.n_drafted),
    ("llamacpp:spec_decode_num_accepted_tokens", "Tokens drafted and accepted.",
     lambda s: s.n_accepted),
    ("specoffload:answers", "Answers that were finished.", lambda s: 1),
    (f"{_INTERNAL}draft_steps", "Decodes of the draft model.", lambda s: s.n_draft_steps),
    (f"{_INTERNAL}draft_seconds", "Time of drafting.", lambda s: s.draft_s),
    (f"{_INTERNAL}verify_seconds", "Time of verifying drafts.", lambda s: s.verify_s),
    (f"{_INTERNAL}rollback_seconds", "Time of rewinding rejected tokens.",
     lambda s: s.rollback_s),
)  # fmt: skip

# Sums by a label: name, help, label, and (label value, count) pairs of one answer.
_BY_LABEL: tuple[tuple[str, str, str, Callable[[GenerationStats], Any]], ...] = (
    (f"{_INTERNAL}policy_decisions", "Rounds by the reason of their draft length.", "reason",
     lambda s: s.decisions),
    (f"{_INTERNAL}draft_length", "Rounds by the length of their draft.", "length",
     lambda s: s.draft_lengths),
    (f"{_INTERNAL}accepted_tokens", "Accepted tokens by drafter.", "drafter",
     lambda s: s.accepted_by_source),
)  # fmt: skip

# Counters of streaming and drafting in the engine process, by the names of their fields.
_OF_ENGINE: Mapping[str, str] = {
    "streamed_bytes": "Bytes of weights copied to the device.",
    "copies": "Copies of weights to the device.",
    "streamed_experts": "Experts copied to the device.",
    "hits": "Uses of a streamed piece that was on the device already.",
    "misses": "Uses of a streamed piece that had to be copied first.",
    "evictions": "Streamed pieces that were evicted from their slot.",
    "prefetched_used": "Pieces copied ahead of their use, and used.",
    "prefetched_wasted": "Pieces copied ahead of their use, and evicted unused.",
    "split_layers": "Layers of experts that were split between the CPU and the device.",
    "n_pairs_hit": "Uses of an expert by a token in split layers, on the device without a copy.",
    "n_pairs_streamed": "Uses of an expert by a token in split layers, on the device after a copy.",
    "n_pairs_host": "Uses of an expert by a token in split layers, on the CPU.",
    "whole_graphs": "Decodes submitted as a whole, because all experts were on the GPU in order.",
    "layers_rung": "Split layers computed without a wait of the host for the GPU.",
    "rows_by_kernels": "Rows of such layers that the GPU's kernels read from the CPU's memory.",
    "layers_ahead": "Layers computed before the host knew their experts, which were all in slots.",
    "layers_repeated": "Layers computed again, because an expert of an earlier layer was missing.",
    "n_repairs": "Times that the device computed layers again.",
    "n_nodes_ahead": "Nodes computed while the CPU still computed experts of the same layer.",
    "routed_choices": "Uses of an expert by a token, where --route-cached is on.",
    "routed_kept": "Those of them that the router would have chosen, too.",
    "routed_hits": "Those of them whose expert was in a slot before.",
    "routed_own_hits": "Uses that the router alone would have had of experts in slots.",
    "n_promoted": "Experts of split layers that were copied for later, while the link was idle.",
    "n_lent_copies": "Experts copied into the compute buffer, which caches them between prompts.",
    "n_lent_dropped": "Experts that left the compute buffer because a batch needed its memory.",
    "cache_bytes": "Bytes of a KV cache in RAM that were copied to GPUs.",
    "cache_ahead_bytes": "Those of them that GPUs had before the layer that reads them.",
    "n_small_plans": "Times that the compute buffer's memory was planned anew after a prompt.",
    "n_early": "Parts of batches whose copies began while another part was computed.",
    "n_deferred": "Parts of prompts computed while other devices computed the next part.",
    "n_filled": "Experts that were copied before the first request.",
    "layers_out_of_order": "Layers of prompts whose experts were read in any slot that held them.",
    "split_trials": "Trials of another way to compute a batch size (--hybrid auto).",
    "split_changes": "Batch sizes that changed to another way after a trial.",
    "split_timings": "Timings of split layers that were repeated between decodes.",
    "n_recorded": "Tokens of a layer whose experts were recorded, to predict hits.",
    "experts_needed": "Uses of an expert by a layer, if not all experts are in memory.",
    "experts_read": "Experts that a layer waited for because they were not in memory.",
    "experts_read_ahead": "Experts that were read before a layer needed them.",
    "experts_unused": "Experts that were read ahead and that the layer did not need.",
    "experts_filled": "Experts that were read before the first request.",
    "table_rows_ahead": "Rows of tables on the disk that were read before a decode needed them.",
    "table_bytes_ahead": "Bytes in the pages of these rows.",
    "disk_bytes": "Bytes of experts read from the disk.",
    "disk_moved_bytes": "Bytes in memory pages that experts got from experts that were evicted.",
    "disk_wait_s": "Seconds in which computation waited for the disk.",
    "disk_busy_s": "Seconds in which experts were read.",
    "idle_cells_read": "Cells of the KV cache that decodes passed, and no running request needed.",
    "idle_cells_s": "Seconds of attention over them, by the machine model.",
    "idle_moves": "Conversations that moved from the cells to RAM.",
    "idle_move_bytes": "Bytes of their states.",
    "idle_move_s": "Seconds of these moves.",
    "idle_returns": "Conversations that came back from RAM.",
    "idle_return_s": "Seconds of these copies.",
    "idle_compactions": "Running requests that moved to lower cells.",
    "size_retries": "Decodes that timed a batch size again, because its time contradicted others.",
    "draft_batches": "Drafts of several answers in one batch.",
    "joint_steps": "Batches whose draft lengths were chosen together.",
    "joint_changed": "Draft lengths chosen together that differ from the answer's own choice.",
    "tree_rounds": "Rounds that verified a tree of drafted tokens instead of a chain.",
    "tree_nodes": "Drafted tokens in these trees.",
    "tree_accepted": "Accepted tokens of these trees.",
    "same_size_rounds": "Rounds of one request with as many rows as the round before.",
    "tree_saved": "Accepted tokens of trees that the likeliest chain would have missed.",
}

# Counters that are also given by device, if there are several devices.
_OF_DEVICE = (
    "streamed_bytes", "copies", "hits", "misses", "split_layers", "n_early", "n_deferred",
)  # fmt: skip


def _by_device(engine: Mapping[str, float]) -> list[Metric]:
    """Counters labelled by device. `engine`: counts, some with names like "copies of CUDA1"."""
    families: list[Metric] = []
    for name in _OF_DEVICE:
        words = f"{_OF_ENGINE[name][:-1]}, by device."
        family = CounterMetricFamily(f"{_INTERNAL}device_{name}", words, labels=["device"])
        for key, value in engine.items():
            counted, _, device = key.partition(" of ")
            if device and counted == name:
                family.add_metric([device], value)
        families += [family] if family.samples else []
    return families


class _Histogram:
    """Counts values by buckets, each of which ends at one of `bounds`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, labels: Mapping[str, str] | None = None) -> Metric:
        """Return the metric, whose buckets count all values up to their bounds."""
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        labels = labels or {}
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class Metrics:
    """Counts since the server's start. They continue when its engine restarts."""

    def __init__(self) -> None:
        self.sums = {name: 0.0 for name, _, _ in _SUMS}  # over finished answers
        self._by_label: dict[str, Counter[object]] = {row[0]: Counter() for row in _BY_LABEL}
        self._n_prefilled = 0
        self._n_tokens_max = 0  # tokens of the longest prompt with its answer
        self._delays = _Histogram(_BOUNDS_S)
        self._histograms = {name: _Histogram(bounds) for name, _, bounds in _HISTOGRAMS}
        self.of_engine: dict[str, float] = {}  # the last known counters of the engine process
        self.n_restarts = 0  # restarts of the engine process
        self.n_refused = 0  # requests that found the queue full

    def add(self, stats: GenerationStats, took_s: float) -> None:
        """Count a finished answer, `took_s` seconds after its request arrived."""
        self._histograms[_QUEUED].add(stats.waited_s)
        self._histograms[_WHOLE].add(took_s)
        if stats.n_tokens:
            self._histograms[_PER_TOKEN].add(stats.decode_s / stats.n_tokens)
        for name, _, value in _SUMS:
            self.sums[name] += value(stats)
        for name, _, _, values in _BY_LABEL:
            self._by_label[name].update(dict(values(stats)))
        self._n_prefilled += stats.n_prefilled
        self._n_tokens_max = max(self._n_tokens_max, stats.n_prompt_tokens + stats.n_tokens)

    def add_delay(self, delay_s: float) -> None:
        """Count the time of a token from the engine to its client's socket."""
        self._delays.add(delay_s)

    def add_first_token(self, after_s: float) -> None:
        """Count the first token of a request, `after_s` seconds after its arrival."""
        self._histograms[_FIRST_TOKEN].add(after_s)

    def families(
        self, *, n_running: int, n_waiting: int, n_parallel: int, model: str = ""
    ) -> list[Metric]:
        """Return the metrics of a model, whose name is `model`. vLLM's dashboards choose by it."""
        sums, engine = self.sums, self.of_engine
        counters = [(name, text, sums[name]) for name, text, _ in _SUMS] + [
            ("specoffload:engine_restarts", "Restarts of the engine process.", self.n_restarts),
            ("specoffload:requests_refused", "Requests that found the queue full.", self.n_refused),
            *((f"{_INTERNAL}{name}", text, engine[name])
              for name, text in _OF_ENGINE.items() if name in engine),
        ]  # fmt: skip
        n_hits, n_misses = engine.get("hits", 0), engine.get("misses", 0)
        n_tokens, decode_s = sums["llamacpp:tokens_predicted"], "llamacpp:tokens_predicted_seconds"
        accepted = sums["llamacpp:spec_decode_num_accepted_tokens"]
        gauges = (
            ("llamacpp:n_tokens_max", "Longest prompt with its answer.", self._n_tokens_max),
            ("llamacpp:prompt_tokens_seconds", "Mean prompt tokens per second.",
             _ratio(self._n_prefilled, sums["llamacpp:prompt_seconds"])),
            ("llamacpp:predicted_tokens_seconds", "Mean tokens per second of an answer.",
             _ratio(n_tokens, sums[decode_s])),
            ("llamacpp:requests_processing", "Requests that are being answered.", n_running),
            ("llamacpp:requests_deferred", "Requests that wait.", n_waiting),
            ("specoffload:acceptance_rate", "Share of drafted tokens that were accepted.",
             _ratio(accepted, sums[N_DRAFTED])),
            ("specoffload:hit_rate", "Share of uses that found their piece on the device.",
             _ratio(n_hits, n_hits + n_misses)),
            ("specoffload:checkpoint_bytes", "RAM of the checkpoints of texts in slots.",
             engine.get("checkpoint_bytes", 0)),
            ("specoffload:stored_prompt_bytes", "RAM of the prompts in --cache-ram.",
             engine.get("stored_prompt_bytes", 0)),
            ("specoffload:slots", "Requests that may run at once.", n_parallel),
        )  # fmt: skip
        families: list[Metric] = [CounterMetricFamily(n, t, value=v) for n, t, v in counters]
        families += _by_device(engine)
        families += [GaugeMetricFamily(name, text, value=value) for name, text, value in gauges]
        families += [
            self._histograms[name].family(name, text, {"model_name": model})
            for name, text, _ in _HISTOGRAMS
        ]
        families.append(
            self._delays.family(
                "specoffload:token_delay_seconds",
                "Time from the engine's token to its client's socket.",
            )
        )
        for name, text, label, _ in _BY_LABEL:
            family = CounterMetricFamily(name, text, labels=[label])
            for key, count in sorted(self._by_label[name].items()):  # type: ignore[type-var]
                family.add_metric([str(key)], count)
            families.append(family)
        return families


def closed_connections(n_closed: int) -> Metric:
    """Return the metric of the connections that the server closed."""
    words = "Connections closed to make room."
    return CounterMetricFamily("specoffload:connections_closed", words, value=n_closed)


def page_of(families: Sequence[Metric]) -> bytes:
    """Return the text of /metrics."""
    page: bytes = generate_latest(SimpleNamespace(collect=lambda: families))  # type: ignore[arg-type]
    return page


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
