"""Searches the fastest ubatch by measured prompts and decodes, one trial after the other. Pure.

A larger ubatch copies streamed weights less often in a prompt, but its buffers take the memory of
slots, which makes answers slower. Plans choose among the same ubatches by the same time of a
workload (`Seconds`), but with modelled times of its prompt and its decodes. Measuring one takes a
start, so not all are tried. The plan's choice is the first, then its neighbours in the direction
that gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from offload.plan.objective import Seconds
from offload.plan.sharing import SMALL_UBATCHES, UBATCHES
from offload.plan.workload import PlannedWork
from offload.times.repeated import half_spread

SIZES = (*SMALL_UBATCHES, *UBATCHES)
NOISE = 0.02  # relative gain below which the plan's ubatch stays


@dataclass(frozen=True)
class UbatchTrial:
    """What was measured with one ubatch: seconds of a prompt's token, and of a decode of one.

    `n_slots` and `n_resident` are the experts' slots and resident layers that its buffers left.
    Slots in the compute buffer count too. Spreads are half the interquartile range over the median;
    0.0 if it is not known.
    """

    prompt_token_s: float
    decode_s: float
    n_slots: int = 0
    n_resident: int = 0
    prompt_spread: float = 0.0
    decode_spread: float = 0.0

    @property
    def spread(self) -> float:
        """The spread of a workload's time, at most."""
        return self.prompt_spread + self.decode_spread

    def seconds(self, work: PlannedWork) -> float:
        """The time of this workload, if its answer is decoded token by token."""
        prompt_s = work.n_prompt * self.prompt_token_s
        return float(Seconds(prompt_s, self.decode_s, self.decode_s, work.n_generated).mean_s)


def trial_of(
    prompts_s: Sequence[float],
    n_prompt: int,
    table_s: float,
    decodes_s: Sequence[float],
    sharing: tuple[int, int],
) -> UbatchTrial:
    """Return the trial of repeated prompts of `n_prompt` tokens and repeated decodes of one token.

    `table_s` is T(1) of the run's table. This start or an earlier one measured it, and serving may
    have corrected it. `decodes_s` were measured on text that was not decoded just before, as those
    of the table were. `sharing` has the slots and resident layers. The fastest prompt and the lower
    of both T(1) count, so no single slow measurement changes the trial.
    """
    return UbatchTrial(
        min(prompts_s) / n_prompt,
        min(table_s, median(decodes_s)),
        *sharing,
        half_spread(prompts_s) or 0.0,
        half_spread(decodes_s) or 0.0,
    )


Trials = Mapping[int, UbatchTrial]  # by ubatch


def levelled(trials: Trials) -> dict[int, UbatchTrial]:
    """Return the trials, with one time of a decode for all that leave the same slots.

    A ubatch changes a decode of one token only by the memory that it leaves for slots. Different
    times with the same slots are noise, and the least of them is the best estimate.
    """
    least: dict[tuple[int, int], float] = {}
    for trial in trials.values():
        key = (trial.n_slots, trial.n_resident)
        least[key] = min(trial.decode_s, least.get(key, trial.decode_s))
    return {
        n: replace(trial, decode_s=least[trial.n_slots, trial.n_resident])
        for n, trial in trials.items()
    }


def next_ubatch(trials: Trials, planned: int, sizes: Sequence[int], work: PlannedWork) -> int:
    """Return the ubatch to try next, 0 if no other is worth it.

    `sizes` are the possible ubatches in ascending order. `planned` is one of them, and was tried.
    """
    trials = levelled(trials)
    tried = sorted(trials)
    best = min(tried, key=lambda n: trials[n].seconds(work))
    at = sizes.index(best)
    sides = [n for n in (*sizes[at + 1 : at + 2], *sizes[max(0, at - 1) : at]) if n not in trials]
    # The step that gained goes on; at the plan's own choice, larger comes first.
    forward = [n for n in sides if (n > best) == (best > planned)] if best != planned else sides
    return next(iter(forward), 0)


def fastest_ubatch(trials: Trials, planned: int, work: PlannedWork) -> int:
    """Return the ubatch with which the workload takes least; the plan's if none is clearly faster.

    The workload's time is the objective of plans, too.
    """
    trials = levelled(trials)
    best = min(trials, key=lambda n: trials[n].seconds(work))
    stays = trials[best].seconds(work) > (1 - NOISE) * trials[planned].seconds(work)
    return planned if stays else best
