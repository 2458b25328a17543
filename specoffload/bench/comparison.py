"""Compares the paths that `bench` measured: speeds, ratios and doubts.

A ratio is None if it means nothing: its two sides vary too much, or computed with different numbers
of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.times.steadiness import if_steady, is_steady, relative_range, speed_words
from specoffload.bench.card_power import use_words
from specoffload.bench.llama_server import server_name
from specoffload.bench.paths import Measured
from specoffload.cpu_load import Load
from specoffload.generation.statistics import GenerationStats

LEAST_REPETITIONS = 3
MOST_SPREAD = 0.2  # relative range of a path's repetitions from which its ratios are doubted
# Names of our paths in tables.
SHOWN = {"unwrapped": "plain CPU", "wrapped": "without drafts", "spec": "with drafts"}
_NO_RATIO = "-"


def shown_name(name: str, streamed_bytes: int) -> str:
    """The name of a path in tables: ours without drafts is "streamed" if weights were copied."""
    return "streamed" if name == "wrapped" and streamed_bytes else SHOWN.get(name, name)


def measured_words(
    name: str, nth: int, stats: GenerationStats, prefill_s: float, of: int, n_long: int
) -> str:
    """The line that is shown as soon as a repetition of a path is measured."""
    shown = shown_name(name, stats.streamed_bytes)
    return (
        f"{shown}, {nth} of {of}: answer {stats.tokens_per_s:.1f} tokens/s, "
        f"prompt {n_long / prefill_s:.0f} tokens/s"
    )


def doubts(by_way: Mapping[str, Measured], load: Load, *, of_prefill: bool = True) -> list[str]:
    """A sentence for each reason why these speeds may be far off, or mean nothing.

    `of_prefill`: the speeds of prompts matter, too.
    """
    words = []
    n = min((len(measured.written) for measured in by_way.values()), default=0)
    if n < LEAST_REPETITIONS:
        each = "each path was measured once" if n == 1 else f"each path was measured {n} times"
        words.append(f"{each}, so the spread is unknown; -r {LEAST_REPETITIONS} shows it")
    if load.is_busy:
        words.append(load.words)
    words += _threads_words(by_way)
    for name, measured in by_way.items():
        for what, times_s in (
            ("decoding", measured.decodes_s),
            ("prefill", measured.prefills_s if of_prefill else ()),
        ):
            shown = shown_name(name, measured.median.streamed_bytes)
            spread = relative_range(times_s)
            if not is_steady(spread):
                range_s = f"{min(times_s):.3g} to {max(times_s):.3g} s"
                words.append(f"{shown}: {what} took {range_s}, so no ratio of it means anything")
            elif spread > MOST_SPREAD:
                words.append(f"{shown}: {what} varied by {spread:.0%}")
    return words


def _threads_words(by_way: Mapping[str, Measured]) -> list[str]:
    """A sentence for each path that gave up threads during the measurement."""
    return [
        f"{shown_name(name, measured.median.streamed_bytes)}: other programs took processors, so "
        f"it computed with {n_lost} thread{'s' * (n_lost > 1)} fewer for a time, and is not "
        "compared with paths that kept all of theirs"
        for name, measured in by_way.items()
        if (n_lost := _most_lost(measured))
    ]


def _most_lost(measured: Measured) -> int:
    return max(measured.n_threads_lost, default=0)


def compared_decodes(one: Measured, other: Measured) -> float | None:
    """The speed of decoding of `one` over that of `other`. None if the ratio means nothing."""
    ratio = one.median.tokens_per_s / other.median.tokens_per_s
    return _if_comparable(ratio, one, other, one.decodes_s, other.decodes_s)


def compared_prefills(one: Measured, other: Measured) -> float | None:
    """The speed of reading the long prompt of `one` over that of `other`, or None as above."""
    ratio = other.prefill_s / one.prefill_s
    return _if_comparable(ratio, one, other, one.prefills_s, other.prefills_s)


def _if_comparable(
    ratio: float, one: Measured, other: Measured,
    one_s: Sequence[float], other_s: Sequence[float],
) -> float | None:  # fmt: skip
    if one is other:
        return 1.0 if is_steady(relative_range(one_s)) else None
    if _most_lost(one) != _most_lost(other):
        return None
    return if_steady(ratio, relative_range(one_s), relative_range(other_s))


def side_by_side(by_way: Mapping[str, Measured], n_long_prompt: int) -> dict[str, Any]:
    """Speeds in tokens/s, and ratios of ours to llama.cpp's; None for those that mean nothing.

    `plain_tps` is llama.cpp's best speed over the ubatch sizes that were measured. `x_plain` has
    each path's speed of decoding over it. `shown` has the speeds of decoding and prompts as texts.
    """
    speeds = {name: measured.median.tokens_per_s for name, measured in by_way.items()}
    prefills = {name: n_long_prompt / measured.prefill_s for name, measured in by_way.items()}
    peers = [name for name in by_way if name.startswith("llama.cpp")]
    ours = [name for name in ("wrapped", "spec") if name in by_way]
    out: dict[str, Any] = {"prefill_tps": prefills, "decode_tps": speeds, "vs": {}}
    out["streamed_bytes"] = {n: measured.median.streamed_bytes for n, measured in by_way.items()}
    out["decode_spread"] = {n: relative_range(m.decodes_s) for n, m in by_way.items()}
    out["shown"] = {name: _speeds_shown(m, n_long_prompt) for name, m in by_way.items()}
    out |= {f"{name}_tps": speeds[name] for name in by_way if name not in peers}
    if peers:
        best = max(peers, key=lambda name: speeds[name])
        out["plain_tps"] = speeds[best]
        out["plain_path"] = best
        out["x_plain"] = {n: compared_decodes(m, by_way[best]) for n, m in by_way.items()}
    if spec := by_way.get("spec"):
        out["acceptance_rate"] = spec.median.acceptance_rate
        out["n_drafted"], out["n_accepted"] = spec.median.n_drafted, spec.median.n_accepted
        out["tokens_per_round"] = spec.median.tokens_per_round
    if "unwrapped" in by_way and "wrapped" in by_way:
        out["wrapped_ratio"] = compared_decodes(by_way["wrapped"], by_way["unwrapped"])
    for name in peers if ours else ():
        writes = by_way[max(ours, key=lambda n: speeds[n])]
        reads = by_way[max(ours, key=lambda n: prefills[n])]
        out["vs"][name] = compared_decodes(writes, by_way[name])
        out["vs"][f"{name}, prefill"] = compared_prefills(reads, by_way[name])
    return out


def vs_server(result: Mapping[str, Any], server_tps: float) -> float | None:
    """Our best speed of decoding over a server's, or None if the ratio means nothing."""
    ours = [name for name in ("wrapped", "spec") if name in result["decode_tps"]]
    if not ours:
        return None
    best = max(ours, key=lambda name: float(result["decode_tps"][name]))
    ratio: float = result["decode_tps"][best] / server_tps
    return if_steady(ratio, result["decode_spread"][best])


def _speeds_shown(measured: Measured, n_long_prompt: int) -> tuple[str, str]:
    writes = [stats.tokens_per_s for stats in measured.written]
    reads = [n_long_prompt / s for s in measured.prefills_s]
    return (
        speed_words(writes, measured.median.tokens_per_s),
        speed_words(reads, n_long_prompt / measured.prefill_s, digits=0),
    )


def card_rows(by_way: Mapping[str, Measured]) -> list[tuple[str, str, str, str, str]]:
    """A row for each path: bytes that it copied in a second, then the card's power and clocks."""
    rows = []
    for name, measured in by_way.items():
        stats = measured.median
        rate = stats.streamed_bytes / stats.decode_s if stats.decode_s else 0.0
        copied = f"{rate / 1e9:.2f} GB/s" if rate else "-"
        rows.append((shown_name(name, stats.streamed_bytes), copied, *use_words(measured.card)))
    return rows


def speed_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of the table of speeds: the measured paths, then the user's own llama-server.

    The last column is the speed of decoding relative to llama.cpp at its best. It has a question
    mark if the measurement is not reliable, and a dash if the ratio means nothing.
    """
    mark = " ?" if result.get("unreliable") else ""

    def ratio_words(ratio: float | None) -> str:
        return _NO_RATIO if ratio is None else f"{ratio:.2f}{mark}"

    ratios = result.get("x_plain", {})
    rows = [
        (
            shown_name(name, result["streamed_bytes"].get(name, 0)),
            *shown,
            ratio_words(ratios.get(name)),
        )
        for name, shown in result["shown"].items()
    ]
    for row in result.get("llama_server", ()):
        flags = row["flags"]
        drafting = flags if "draft-mtp" in flags else flags[2:]  # flags after -md FILE
        further = (row.get("cache_flags", ()), row.get("load_flags", ()))
        name = server_name(drafting, row["n_cpu_moe"], row["moe_cache_mib"], *further)
        tps, ratio = row["decode_tps"], None
        if plain := result.get("plain_path"):
            ratio = if_steady(tps / result["plain_tps"], result["decode_spread"][plain])
        rows.append((name, f"{tps:.1f}", f"{row['prefill_tps']:.0f}", ratio_words(ratio)))
    return rows
