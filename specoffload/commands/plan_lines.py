"""The first lines of `specoffload plan`, and those on contexts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from offload.kv_overrides import override_flags
from offload.plan.llama_cpp import CPU_SHARE_BUILD, LlamaSpeeds
from offload.plan.placement import workload_of
from offload.schedule.cached_choice import RouteOptions
from offload.units import rate_words, size_words
from specoffload.config.options import ServeOptions
from specoffload.opening.context_size import Contexts
from specoffload.opening.planning import Planned
from specoffload.opening.speeds import mtp_speed, prompt_words, rounded, speed_range, speed_words

# Ratio of modelled speeds up to which they count as alike. The model is not more exact
# (docs/hybrid-model.md).
_EQUAL = 1.125
_SYSTEM_BYTES = 2 << 30  # RAM for this program and the system, beside weights and kept prompts
# Share of published speeds within these errors: docs/validation.md.
_PROMPT_ERROR, _ANSWER_ERROR = "± 40 %", "± 25 %"


def first_lines(
    planned: Planned, start: Sequence[str], cache_ram_mib: int, route: RouteOptions
) -> list[tuple[str, str]]:
    """Names and sentences. `start` are the arguments of the command to start.

    `cache_ram_mib` is the value of --cache-ram. `route` adds a row if routers prefer cached
    experts.
    """
    others = Others(cache_ram_mib)
    rows = [
        (_fit_name(planned, others), _fit_words(planned, others)),
        ("compared", _compared_words(planned)),
        ("start", f"specoffload {shlex.join(start)}"),
        ("llama.cpp", _llama_command(planned)),
        ("prompts", _prompt_words(planned)),
        ("answers", _answer_words(planned)),
    ]
    return [*rows, ("cached routing", _route_words(planned, route))] if route.is_on else rows


# -- memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Others:
    """Name the needs of RAM beside weights: program, system, kept prompts (--cache-ram)."""

    cache_ram_mib: int = ServeOptions.cache_ram_mib  # -1: no limit

    @property
    def needed_bytes(self) -> int:
        """Prompts without a limit only take what is left."""
        return _SYSTEM_BYTES + (max(0, self.cache_ram_mib) << 20)

    @property
    def words(self) -> str:
        """The subject of a sentence on `needed_bytes`, with its verb."""
        return "kept prompts and the system need" if self.cache_ram_mib > 0 else "the system needs"


def _spare_bytes(planned: Planned, others: Others) -> int:
    """RAM that is left beside streamed weights and `others`; below 0 if that is too little.

    It is 0 if nothing is in RAM, or if weights stay in the page cache.
    """
    room, plan = planned.room, planned.plan
    if room is None or not plan.streamed:
        return 0
    return room.available_bytes - plan.streamed_bytes - others.needed_bytes


def _fit_name(planned: Planned, others: Others) -> str:
    if planned.disk is not None:
        return "needs the disk"
    return "fits barely" if _spare_bytes(planned, others) < 0 else "fits"


def _fit_words(planned: Planned, others: Others) -> str:
    plan, room, facts = planned.plan, planned.room, planned.facts
    words = f"{facts.path.name}, {size_words(facts.size_bytes)}: "
    needed_bytes = plan.streamed_bytes
    if planned.on_cpu:
        needed_bytes += plan.used_bytes
        if room is None:
            return f"{words}{size_words(needed_bytes)} in RAM, weights in the page cache (--mmap)"
        free_bytes = room.available_bytes + plan.resident_bytes + plan.reserve_bytes
    else:
        of_all = f" of {size_words(planned.vram_bytes)}" if planned.vram_bytes else ""
        words += f"{size_words(plan.used_bytes)}{of_all} on the GPU, "
        if not plan.streamed:
            return f"{words}no weights in RAM"
        if room is None:
            return f"{words}{size_words(needed_bytes)} in the page cache (--mmap)"
        free_bytes = room.available_bytes
    needed, free = size_words(needed_bytes), f"{size_words(free_bytes)} ({room.limited_by})"
    if planned.disk is not None:
        return (
            f"{words}{needed} are for RAM, which has {free}. "
            f"{size_words(planned.missing_bytes)} are read from the disk, which is slow"
        )
    more = f"about {size_words(others.needed_bytes)}"
    spare_bytes = _spare_bytes(planned, others)
    if spare_bytes < 0:
        subject = others.words[0].upper() + others.words[1:]
        limit = " (--cache-ram limits kept prompts)" if others.cache_ram_mib > 0 else ""
        return (
            f"{words}{needed} of weights in RAM, which has {free}. {subject} {more} more, so "
            f"{size_words(-spare_bytes)} are missing{limit}"
        )
    return (
        f"{words}{needed} of {size_words(free_bytes)} in RAM ({room.limited_by}), where "
        f"{others.words} {more}"
    )


# -- speeds ----------------------------------------------------------------------------------------


def _prompt_words(planned: Planned) -> str:
    words = f"about {rate_words(prompt_words(planned))} ({_PROMPT_ERROR})"
    llama = planned.llama
    if llama is None:
        return words
    return f"{words}; llama.cpp {rounded(llama.prefill_tps)} with {llama.prompt_flags}"


def _answer_words(planned: Planned) -> str:
    speed = speed_words(planned)
    ends = "each " if " to " in speed else ""
    words = [f"about {rate_words(speed)} ({ends}{_ANSWER_ERROR})"]
    if " to " in speed:
        words.append("more if your texts prefer some experts")
    if planned.expected["full_context_decode_tps"] < 0.95 * planned.expected["decode_tps"]:
        at_end = speed_words(planned, full_context=True)
        words.append(f"{at_end} at the end of {planned.context.n_ctx:,} tokens")
    if "mtp_decode_tps" in planned.expected:
        words.append(f"{mtp_speed(planned)} with drafts by its own layers")
    end = planned.plan.decode_end
    if end is not None:
        prompts, answers = end.in_words
        words.append(f"{answers} with --plan-for decode (prompts {prompts})")
    llama = planned.llama
    return ", ".join(words) + (
        ""
        if llama is None
        else f"; llama.cpp {_llama_answers(llama, planned.expected['decode_tps'])}"
    )


def _route_words(planned: Planned, route: RouteOptions) -> str:
    """Return what --route-cached is expected to bring, and what it costs."""
    name = f"--route-cached {route.strength:g}"
    routed = planned.preferring_cached(route)
    if reason := route.no_effect_reason(planned.facts.n_experts_used):
        return f"{name} changes nothing: {reason}"
    if routed.expected["decode_tps"] <= planned.expected["decode_tps"]:
        return f"no faster answers are expected with {name}: they do not wait for missing experts"
    return (
        f"answers about {rate_words(speed_words(routed))} with {name} (a guess from drawn "
        "routing). Texts differ from the model's own, and depend on what was asked before: "
        "bench --route-cached measures that"
    )


# -- beside llama.cpp ------------------------------------------------------------------------------


def _llama_answers(llama: LlamaSpeeds, best_tps: float) -> str:
    """Return llama.cpp's speeds, and those of forks that copy every miss if above `best_tps`."""
    words = f"{rounded(llama.decode_tps)} with {llama.flags}"
    if llama.cache_decode_tps is None:
        return words
    words += f", {speed_range(*llama.cache_decode_tps)} with its cache"
    if llama.read_decode_tps is None or max(llama.read_decode_tps) <= best_tps:
        return words
    return f"{words}, {speed_range(*llama.read_decode_tps)} in forks whose GPU copies every miss"


def _cache_is_faster(llama: LlamaSpeeds) -> bool:
    return llama.cache_decode_tps is not None and max(llama.cache_decode_tps) > llama.decode_tps


def _cache_name(llama: LlamaSpeeds) -> str:
    share = " and CPU share" if llama.build == CPU_SHARE_BUILD else ""
    return f"its cache{share} ({llama.build})"


def _compared_words(planned: Planned) -> str:
    """One sentence: like llama.cpp, faster or slower, and with which of its flags and builds."""
    llama = planned.llama
    if llama is None:
        return _not_compared_words(planned)
    theirs = llama.cache_decode_tps or (llama.decode_tps,) * 2
    ours = (planned.least_decode_tps, planned.expected["decode_tps"])
    answers = [own / max(llama.decode_tps, other) for own, other in zip(ours, theirs, strict=True)]
    named = _cache_name(llama) if _cache_is_faster(llama) else llama.flags
    prompts = planned.expected["prefill_tps"] / llama.prefill_tps
    return (
        f"answers {_ratio_words(answers)} llama.cpp with {named}, "
        f"prompts {_ratio_words([prompts])} llama.cpp with {llama.prompt_flags} (all modelled)"
    )


def _ratio_words(ratios: Sequence[float]) -> str:
    """Ratios of our speeds to theirs as words before a name: "like", "1.7 × as fast as"."""
    least, most = min(ratios), max(ratios)
    if least >= 1 / _EQUAL and most <= _EQUAL:
        return "like"
    return f"{speed_range(least, most)} × as fast as"


def _not_compared_words(planned: Planned) -> str:
    if planned.on_cpu and planned.disk is None:
        return "answers and prompts like llama.cpp, which has the same CPU backend"
    if planned.disk is not None:
        return (
            "llama.cpp is not modelled: it reads through mmap what RAM does not hold (docs/disk.md)"
        )
    what = "several devices" if planned.is_divided else "this layout"
    return (
        f"llama.cpp is not modelled for {what}; measure it: "
        "specoffload bench MODEL --vs llama-server=PATH"
    )


def _llama_command(planned: Planned) -> str:
    """llama.cpp's command with the flags of its fastest answers, as far as these are known."""
    path, llama = planned.facts.path, planned.llama
    words = ["llama-server", "-m", str(path), "-c", str(planned.context.n_ctx)]
    words += override_flags(planned.facts.overrides)
    if llama is None:
        return shlex.join(words)
    flags = llama.cache_flags if _cache_is_faster(llama) else llama.flags
    gpu = [] if "-ngl" in flags else ["-ngl", "99"]
    command = shlex.join([*words, *gpu, *flags.split()])
    if _cache_is_faster(llama) and llama.build == CPU_SHARE_BUILD:
        command += "   (and --moe-cache-cpu-share, whose values `bench --vs` tries)"
    return command


# -- contexts --------------------------------------------------------------------------------------


def context_lines(planned: Planned, contexts: Contexts) -> list[str]:
    """What the chosen context costs, and why a smaller context may read prompts more slowly."""
    known = [cost for cost in contexts.costs if cost.planned is not None]
    tps = {cost.n_ctx: cost.planned.expected["prefill_tps"] for cost in known if cost.planned}
    chosen, lines = planned.context.n_ctx, []
    fastest = max(tps, key=lambda n: tps[n], default=chosen)
    if tps.get(fastest, 0.0) > _EQUAL * planned.expected["prefill_tps"]:
        (other,) = [cost.planned for cost in known if cost.n_ctx == fastest]
        assert other is not None
        mine, theirs = speed_words(planned), speed_words(other)
        answers = "are as fast" if mine == theirs else f"{mine}, where it has {theirs}"
        lines.append(
            f"The chosen {chosen:,} tokens cost speed: prompts {prompt_words(planned)} tokens/s, "
            f"where --ctx-size {fastest} has {prompt_words(other)}; answers {answers}"
        )
    short = [n for n in tps if n < fastest and _EQUAL * tps[n] < tps[fastest]]
    if short and workload_of(short[0]).n_prompt < workload_of(fastest).n_prompt:
        lines.append(
            f"Prompts in {short[0]:,} tokens are slower, since they are shorter: a pass over a "
            "layer's experts is shared by fewer tokens"
        )
    return lines
