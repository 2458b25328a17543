"""The prices of a session's drafts: T(n) of the target, the drafters' steps, and calibration."""

from __future__ import annotations

import logging
from statistics import fmean

from offload.engine import Engine
from offload.model_file import model_hash, read_facts
from offload.routing.routing import union_of_neighbours
from offload.sequences.block_draft import BlockDraft
from offload.sequences.row_draft import RowDraft
from offload.times.learner import Learner
from offload.times.table import CostTable, DecodeTime, Way
from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile, Timed
from specdec.costs.profile_io import parse_batch_costs
from specdec.costs.unions import cheaper_than_one, with_unions
from specdec.options import DrafterName, PolicyName
from specoffload.config.speculation import SpecConfig
from specoffload.kept import KeptDraft, KeptRun
from specoffload.opening.draft_model import (
    DraftModel,
    block_length,
    draft_key,
    real_text,
    step_by_depth_s,
)

log = logging.getLogger("specoffload.session")

_UNPRICED = CostProfile((1.0,), relative=True)  # for policies that read no T(n)


def curve_as_prices(
    curve: CostProfile, n_experts: int, n_used: int, source: str
) -> tuple[CostProfile, list[str]]:
    """Return the curve by which drafts are priced at first, and warnings about the given curve.

    A token uses `n_used` of a layer's `n_experts` experts; 0: the model has none.
    A mixture's curve is a lower end, because it may have been measured with the same experts for
    all tokens. So the prices contain the reads of different experts that it leaves out, and decodes
    correct them.
    """
    warnings = []
    if free := cheaper_than_one(curve):
        n = free[0]
        more = f" and {len(free) - 1} more" if len(free) > 1 else ""
        warnings.append(
            f"{source}: c[{n}]{more} is below 1/{n}, so {n} tokens would take less time than one. "
            "Batch 1 was probably measured cold: measure the curve again after a warm-up"
        )
    if not (n_experts and n_used):
        return curve, warnings
    unions = [
        float(union_of_neighbours(n, n_used, n_experts)) / n_used for n in range(1, curve.n_max + 1)
    ]
    prices = with_unions(curve, unions)
    n = min(8, curve.n_max)
    if prices.step_s != curve.step_s:
        one_s, before_s, after_s = curve.step_s[0], curve.time(n), prices.time(n)
        warnings.append(
            f"{source}: the curve is a lower end for this mixture, as it grows too little for "
            f"tokens with experts of their own. --spec-policy throughput prices {n} tokens at "
            f"{after_s / one_s:.1f} T(1), not {before_s / one_s:.1f}, until decodes show the time"
        )
    return prices, warnings


class DraftPrices:
    """Measures the costs of drafts for the policy. They are kept with the session's run."""

    def __init__(self, spec: SpecConfig, target: Engine, draft: DraftModel | None) -> None:
        self._spec, self._target, self._draft = spec, target, draft
        self.profile, self.calibration = _UNPRICED, Calibration()
        # Seconds of a step by drafter that spends steps. With several, the policy corrects them.
        self.steps_s: dict[str, float] = {}
        self.given: Learner | None = None  # costs that the user gave

    def measure(self, run: KeptRun) -> bool:
        """Measure the drafters whose times `run` lacks. Returns True if there are such drafters."""
        missing = {name: kept for name, kept in self._kept(run).items() if not kept.step_s}
        for name, kept in missing.items():
            kept.step_s = fmean(self._measured(name).values())
        return bool(missing)

    def _measured(self, drafter: str) -> dict[int, float]:
        """Measure the seconds of a drafter's step, by number of context tokens."""
        if drafter == DrafterName.DRAFT:
            assert self._draft is not None
            return step_by_depth_s(self._draft.sequences, real_text(self._draft))
        assert self._target.opened.row_draft is not None
        layers, n_max = self._target.opened.row_draft, self._spec.options.n_max
        return step_by_depth_s(layers, real_text(self._target), n_max)

    def price(self, run: KeptRun, learner: Learner | None, usual: Way | None) -> list[str]:
        """Set the calibration, and the cost curve that the policy begins with.

        The curve is `learner`'s, whose times of the way `usual` were measured. Without a learner
        no policy reads the curve. Returns lines for the start.
        """
        spec, table = self._spec, run.table
        self.calibration = Calibration(self._calibrated(run).calibration)
        self.steps_s |= {name: kept.step_s for name, kept in self._kept(run).items()}
        if spec.batch_costs is not None:
            given = parse_batch_costs(spec.batch_costs)
            facts = self._target.facts
            shape = facts.n_experts, facts.n_experts_used
            source = spec.costs_from.partition(";")[0]
            prices, warnings = curve_as_prices(given, *shape, source)
            # Published rules compare probabilities with the curve itself.
            is_default = spec.options.policy is PolicyName.THROUGHPUT
            self.profile = prices if is_default else given
            for words in warnings:
                log.warning("%s", words)
            entries = {n: DecodeTime(s, n_timed=1) for n, s in enumerate(self.profile.step_s, 1)}
            self.given = Learner(
                CostTable(ways={Way.FIXED: entries}), self.profile.n_max,
                lambda n: (Way.FIXED,), relative=True,
            )  # fmt: skip
            return [f"profile: {spec.costs_from}"]
        if learner is not None and usual is not None:
            n_max = run.n_verify
            threads = self._target.layout.context.n_threads
            many = f", {threads} thread{'s' * (threads > 1)}" if threads else ""
            self.profile = CostProfile(
                tuple(learner.times[:n_max]),
                self.step_s(run),
                timed=tuple(
                    Timed(n, e.n_timed, e.spread)
                    for n, e in sorted(table.measured(usual).items())
                    if n <= n_max
                ),
                title=f"{self._target.facts.path.name} on {self._target.start.choice.name}{many}",
            )
        return []

    def keep(self, run: KeptRun, learner: Learner | None) -> None:
        """Write the calibration into `run`, and what `learner` has learnt about steps."""
        self._calibrated(run).calibration = self.calibration.bins
        if learner is None:
            return
        drafts = self._kept(run)
        several_s = self.several_s
        for name, kept in drafts.items():
            kept.step_s = learner.draft_step_s if several_s is None else several_s[name]
            if several_s is None:
                kept.step_spread = learner.draft_step_spread

    def _kept(self, run: KeptRun) -> dict[str, KeptDraft]:
        """The kept measurements of each drafter that spends draft steps, by its name."""
        keys = {}
        if self._draft is not None:
            keys[str(DrafterName.DRAFT)] = draft_key(self._draft)
        by_rows = self._spec.options.from_rows
        if self._target.opened.row_draft is not None and by_rows is not None:
            keys[str(by_rows)] = self._key_of_rows(self._target.opened.row_draft)
        return {name: run.drafts.setdefault(key, KeptDraft()) for name, key in keys.items()}

    def _key_of_rows(self, layers: RowDraft) -> str:
        """The key of what drafts from rows. Shorter blocks draft other tokens, in another time."""
        file, n_max = self._target.start.options.row_file, self._spec.options.n_max
        if file is None:
            return "own layers"
        key = model_hash(read_facts(file))
        if (
            isinstance(layers, BlockDraft)
            and (n := block_length(layers, n_max)) < layers.shape.n_most
        ):
            return f"{key} blocks of {n}"
        return key

    def _calibrated(self, run: KeptRun) -> KeptDraft:
        """The kept calibration of all drafters, which is with the first that spends steps."""
        kept = [*self._kept(run).values()]
        return kept[0] if kept else run.drafts.setdefault("", KeptDraft())

    @property
    def several_s(self) -> dict[str, float] | None:
        """Seconds of a step of each drafter that spends steps, which the policy corrects.

        None if fewer than two do. The learner then corrects the only drafter's step.
        """
        return self.steps_s if len(self.steps_s) > 1 else None

    def step_s(self, run: KeptRun) -> float:
        """Seconds of a draft step: the mean of the drafters that spend steps; 0 without any."""
        steps_s = [kept.step_s for kept in self._kept(run).values()]
        return fmean(steps_s) if steps_s else 0.0
