"""Options that restrict what a plan chooses, and the command line without them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from offload.plan.long_prompts import LONG_UBATCHES
from offload.plan.placement import Passes
from offload.schedule.cached_choice import RouteOptions
from offload.stream.options import StreamingOptions
from offload.times.min_batch import MinBatch
from offload.trace.trace import NO_TRACE, Trace
from specoffload.config.options import Options, Toggle


@dataclass(frozen=True)
class HybridChoice:
    """The choice of --hybrid: when layers are split between CPU and GPU.

    `on` splits always, `auto` at the batch sizes where splitting was measured to be faster, `off`
    never. `asked` is True if the user chose it. The user is then told if no layer can be split.
    `reason` says why it is `off` if the user did not choose it.
    """

    toggle: Toggle = Toggle.OFF
    asked: bool = False
    reason: str = ""


# Options that restrict what a plan chooses. None of them changes what is computed, or how much
# memory may be used. Two that belong together follow each other.
_PLACING = (
    *("ubatch_size", "batch_size", "n_gpu_layers", "n_cpu_moe", "min_batch", "hybrid"),
    *("kv_offload", "tensor_split", "flash_attn", "swa_full", "mmap"),
)


@dataclass(frozen=True)
class PlacingFlags:
    """The given flags that restrict what a plan chooses, and the command line without some."""

    options: Options
    without: frozenset[str]  # parts that SPECOFFLOAD_WITHOUT leaves out

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of `options` that were given."""
        return tuple(name for name in _PLACING if name in self.options.given)

    def flags(self, fields: Iterable[str]) -> tuple[str, ...]:
        """The names under which these fields were given."""
        return tuple(self.options.given[name] for name in fields)

    def changes_without(self, left_out: Collection[str]) -> dict[str, Any]:
        """The fields of a Config, if these fields of `options` are not given."""
        options = self.options
        defaults: dict[str, Any] = {
            f.name: f.default for f in fields(Options) if f.name in left_out
        }
        given = {name: flag for name, flag in options.given.items() if name not in left_out}
        return left_to_the_plan(replace(options, given=given, **defaults), self.without)


def left_to_the_plan(options: Options, without: frozenset[str]) -> dict[str, Any]:
    """The fields of a Config that a plan chooses, or that restrict its choice.

    `without` are the parts that SPECOFFLOAD_WITHOUT leaves out.
    """
    hybrid, asked = _choose_hybrid(options), options.min_batch
    return {
        "batch_size": options.batch_size,
        "flash_attn": options.flash_attn,
        "kv_offload": options.kv_offload,
        "swa_full": options.swa_full,
        "mmap": options.mmap,
        "tensor_split": options.tensor_split,
        "min_batch": asked if isinstance(asked, MinBatch) else None,
        "ubatch_size": options.ubatch_size and min(options.ubatch_size, options.batch_size),
        "most_ubatch": _most_ubatch(options),
        "hybrid": hybrid,
        "n_gpu_layers": options.n_gpu_layers,
        "n_cpu_moe": "fit" if options.n_cpu_moe is None else options.n_cpu_moe,
        "passes": _passes(options),
        "plan_for_splits": _may_split(options, hybrid, without),
    }


def _choose_hybrid(options: Options) -> HybridChoice:
    """The choice of --hybrid; auto by default, off if --min-batch is a number."""
    if options.hybrid is not None:
        return HybridChoice(options.hybrid, asked=True)
    if isinstance(options.min_batch, MinBatch):
        flag = options.given.get("min_batch", "--min-batch")
        return HybridChoice(reason=f"{flag} decides alone (--hybrid auto measures what is faster)")
    return HybridChoice(Toggle.AUTO)


def _may_split(options: Options, hybrid: HybridChoice, without: frozenset[str]) -> bool:
    """True if a start may split layers. `auto` splits none if it cannot measure what is faster."""
    measures = options.use_profile and "profile" not in without
    return hybrid.toggle is Toggle.ON or (hybrid.toggle is Toggle.AUTO and measures)


def _most_ubatch(options: Options) -> int:
    return options.batch_size if "batch_size" in options.given else LONG_UBATCHES[-1]


def _passes(options: Options) -> Passes:
    """The rule for batches whose experts do not fit the slots at once.

    If the user asks for batches to stream, they do so in passes where slots are too few.
    """
    asked = options.min_batch
    is_asked = isinstance(asked, MinBatch) and asked.experts <= _most_ubatch(options)
    return "on" if is_asked else "auto"


def streaming_of(options: Options, without: frozenset[str]) -> StreamingOptions:
    """Return the switches of a run."""
    chosen = StreamingOptions(
        warmup=options.warmup,
        trace=Trace() if options.trace is not None else NO_TRACE,
        route=RouteOptions(options.route_cached, options.route_keep),
    )
    return replace(chosen, **switched_off(StreamingOptions, without))


def parts_of(section: type) -> set[str]:
    """The names of the switches in a class of options that are on by default."""
    return {f.name for f in fields(section) if f.default is True}


def switched_off(section: type, without: Iterable[str]) -> dict[str, Any]:
    return {name: False for name in parts_of(section) & {w.replace("-", "_") for w in without}}
