"""Reads which processors the flags name for threads: --cpu-mask, --cpu-range, --cpu-strict.

They have llama.cpp's meanings (common/common.cpp, parse_cpu_mask and parse_cpu_range), but a mask
without a usable processor is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from numa.threads import Processors, one_each
from numa.topology import Topology, format_list
from specoffload.config.options import CpuRange, DraftOptions, Options
from specoffload.errors import UsageError

FIELDS = tuple(
    f"{kind}{suffix}"
    for suffix in ("", "_batch")
    for kind in ("cpu_mask", "cpu_range", "cpu_strict")
)


@dataclass(frozen=True)
class AskedProcessors:
    """Processors that flags name for some threads. `cpus` is () if they name none.

    `names` are the flags, for messages. If `strict`, each thread is bound to a processor.
    """

    cpus: tuple[int, ...] = ()
    names: str = ""
    strict: bool = False

    def machine(self, topology: Topology) -> Topology:
        """The machine with no other processors than those that are named."""
        return topology.within(self.cpus)

    def n_most(self, topology: Topology) -> int:
        """The largest number of threads that have a processor each."""
        return len(self.machine(topology).allowed_cpus)

    def placed(self, n_threads: int, topology: Topology) -> Processors:
        """The processors of `n_threads`."""
        if self.strict:
            return Processors(one_each(self.machine(topology), n_threads), strict=True)
        return Processors(self.cpus)


NOTHING_ASKED = AskedProcessors()


def asked_processors(
    of: Options | DraftOptions,
    name: Callable[[str], str],
    topology: Topology,
    reasons: list[str],
    default: tuple[AskedProcessors, AskedProcessors] = (NOTHING_ASKED, NOTHING_ASKED),
) -> tuple[AskedProcessors, AskedProcessors]:
    """The processors that `of` names for one-token decodes, and for batches.

    `name` returns a field's flag, and `default` has what the target's flags name. Raises UsageError
    if this process may use none of the named ones.
    """
    decode = _asked(of, "", name, default[0], topology, reasons)
    # Flags for batches replace those for all decodes, which replace the target's.
    is_own = decode != default[0] or default == (NOTHING_ASKED, NOTHING_ASKED)
    return decode, _asked(of, "_batch", name, decode if is_own else default[1], topology, reasons)


def _asked(
    of: Options | DraftOptions,
    suffix: str,
    name: Callable[[str], str],
    default: AskedProcessors,
    topology: Topology,
    reasons: list[str],
) -> AskedProcessors:
    """The processors that the flags of this `suffix` name, or `default` without such flags."""
    masks, ranges, strict = (
        getattr(of, f"{kind}{suffix}") for kind in ("cpu_mask", "cpu_range", "cpu_strict")
    )
    if strict is not None:
        default = replace(default, strict=strict)
    if not masks and not ranges:
        return default
    given = {f"cpu_mask{suffix}": masks, f"cpu_range{suffix}": ranges}
    names = " and ".join(name(field) for field, values in given.items() if values)
    allowed = topology.allowed_cpus
    named = _named(masks, ranges, max(allowed))
    if not named:  # masks without a bit, which mean "no mask"
        return replace(default, cpus=(), names="")
    usable = tuple(sorted(named & set(allowed)))
    missing = tuple(sorted(named - set(allowed)))
    here = f"this process may use processors {format_list(allowed)}"
    if not usable:
        raise UsageError(
            f"{names}: {here}, and of these none is named ({format_list(missing)} are)"
        )
    if missing:
        are = f"{format_list(missing)} {'is' if len(missing) == 1 else 'are'}"
        reasons.append(f"{names}: {here}, so {are} left out")
    return replace(default, cpus=usable, names=names)


def _named(
    masks: Sequence[Sequence[int]], ranges: Sequence[CpuRange], last_cpu: int
) -> frozenset[int]:
    """The processors of masks and ranges together. An open range ends at `last_cpu`."""
    cpus = {cpu for mask in masks for cpu in mask}
    for one in ranges:
        end = max(last_cpu, one.first) if one.last is None else one.last
        cpus.update(range(one.first, end + 1))
    return frozenset(cpus)
