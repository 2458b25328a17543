"""The T(n) that a run goes by: given, stored by an earlier run, or measured at a first start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from offload.engine import Engine
from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import parse_batch_costs
from specoffload.config.speculation import SpecConfig
from specoffload.speculation.draft_model import DraftModel
from specoffload.speculation.profile_store import fuller, key_of, load_stored, profile_path, store
from specoffload.speculation.profiling import measure_again, measure_quickly

_UNPRICED = CostProfile((1.0,), relative=True)  # for policies that read no T(n)


@dataclass(frozen=True)
class RunCosts:
    """The costs in use; `path` is None where they are not ours to store."""

    profile: CostProfile
    calibration: Calibration
    path: Path | None
    notes: tuple[str, ...]


def open_costs(
    config: SpecConfig,
    target: Engine,
    draft: DraftModel | None,
    on_progress: Callable[[float], None] | None = None,
) -> RunCosts:
    """May measure for some seconds. Raises BadProfile."""
    if config.batch_costs is not None:
        costs = parse_batch_costs(config.batch_costs)
        notes = ("profile: GGML_BATCH_COSTS", *_warned(costs))
        return RunCosts(costs, Calibration(), None, notes)
    if not config.needs_profile:
        return RunCosts(_UNPRICED, Calibration(), None, ())
    assert config.profile_dir is not None
    key = key_of(target, draft)
    path = profile_path(config.profile_dir, target, draft, key)
    stored, why = load_stored(path, key)
    longest = 0 if config.options.n_max is None else 1 + config.longest
    if stored is not None and stored.costs.n_max < longest:
        why = f"the stored profile ends at batches of {stored.costs.n_max}"
        stored = None
    if stored is not None:
        costs = stored.costs
        if costs.to_retry:
            costs, how = measure_again(target, costs, on_progress)
            why = f"{why}; {how}"
            store(path, costs, stored.calibration)  # where that fails, the end of the run says so
        return RunCosts(costs, stored.calibration, path, (f"profile: {why}", *_warned(costs)))
    costs, how = measure_quickly(target, draft, key, on_progress)
    failed = fuller(path, costs) or store(path, costs, None)
    notes = (f"profile: {why}; {how}", *_warned(costs))
    if failed is not None:
        notes = (*notes, failed)
    return RunCosts(costs, Calibration(), path if failed is None else None, notes)


def widened(costs: CostProfile, before: CostProfile) -> CostProfile:
    """`costs` with the batch sizes beyond a short --draft-max, scaled like its last one."""
    n = costs.n_max
    if n >= before.n_max:
        return costs
    factor = costs.step_s[-1] / before.step_s[n - 1]
    return replace(costs, step_s=costs.step_s + tuple(t * factor for t in before.step_s[n:]))


def _warned(costs: CostProfile) -> tuple[str, ...]:
    return tuple(f"profile: {warning}" for warning in costs.warnings)
