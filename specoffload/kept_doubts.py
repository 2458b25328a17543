"""Finds choices of `tune` that the decodes of later runs contradict.

A choice is doubted if a decode of one token takes longer with it than the next best choice took
when `tune` tried that one, by more than both spreads. A run's decodes count as its start measured
them or as serving corrected them, whichever is less: a longer text makes decodes slower, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from numa.tune import TuneResult
from offload.plan.ubatch_search import levelled
from offload.times.hits import Sharing
from offload.units import milliseconds
from specoffload.kept import CACHE, KeptRun, KeptUbatch, alike

_LEAST_DOUBT = 0.05  # relative excess that is never noise alone


@dataclass(frozen=True)
class OneToken:
    """A run's decode of one token: its seconds, their spread, and the day of the last decode."""

    seconds: float
    spread: float
    date: str


def one_token(run: KeptRun) -> OneToken | None:
    """Return the decode of one token in the fastest way, or None if it was not measured."""
    if not run.table.is_measured:
        return None
    way, seconds = run.table.best(1)
    entry = run.table.measured(way).get(1)
    if entry is None:
        return None
    least = min(1.0, entry.first_s / entry.seconds)
    return OneToken(seconds * least, entry.spread, entry.date)


def comparable(run: KeptRun) -> dict[str, str]:
    """Return the settings of a run that decide what one token takes, besides its slots."""
    names = ("device", "threads", CACHE, "build")
    return {name: run.settings[name] for name in names if name in run.settings}


def _newest(
    runs: Iterable[KeptRun], settings: Mapping[str, str], sharing: Sharing, since: str
) -> OneToken | None:
    """Return the decode of the newest run with these settings and slots, measured since a day."""
    for run in [*runs][::-1]:
        has = settings.items() <= run.settings.items()
        its = one_token(run)
        if has and its is not None and its.date >= since and _as_many(run.sharing, sharing):
            return its
    return None


def _as_many(one: Sharing, other: Sharing) -> bool:
    return alike(replace(one, n_dense_streamed=other.n_dense_streamed), other)


def threads_doubt(tuned: TuneResult, runs: Sequence[KeptRun]) -> str:
    """Return a clause on why the chosen threads and placement are doubted, or "".

    `runs`: those of the model with which the choice was measured.
    """
    sharing = Sharing(tuned.n_slots, tuned.n_resident)
    if not tuned.settings:
        return ""
    its = _newest(runs, tuned.settings, sharing, tuned.date)
    others = [t for t in tuned.trials if t.candidate != tuned.best and 1 in t.seconds]
    if its is None or not others:
        return ""
    rival = min(others, key=lambda trial: trial.score_s)
    spread = max(_LEAST_DOUBT, its.spread + rival.spreads.get(1, 0.0))
    if its.seconds <= (1.0 + spread) * rival.seconds[1]:
        return ""
    return (
        f"T(1) is {milliseconds(its.seconds)} with {tuned.best}, and {rival.candidate} took "
        f"{milliseconds(rival.seconds[1])} when it was tried"
    )


def ubatch_doubt(tuned: KeptUbatch, runs: Sequence[KeptRun]) -> str:
    """Return a clause on why the chosen ubatch is doubted, or "". `runs`: those of the model."""
    trials, n, work = levelled(tuned.trials), tuned.n_ubatch, tuned.work
    chosen = trials.pop(n, None)
    if chosen is None or not tuned.run or work is None or not trials:
        return ""
    sharing = Sharing(chosen.n_slots, chosen.n_resident)
    its = _newest(runs, {**tuned.run, "ubatch": str(n)}, sharing, tuned.date)
    if its is None:
        return ""
    same = {
        m: replace(trial, decode_s=its.seconds)
        for m, trial in {n: chosen, **trials}.items()
        if (trial.n_slots, trial.n_resident) == (chosen.n_slots, chosen.n_resident)
    }
    trials |= {m: trial for m, trial in same.items() if m != n}
    rival = min(trials, key=lambda m: trials[m].seconds(work))
    its_s, rival_s = same[n].seconds(work), trials[rival].seconds(work)
    spread = its.spread + chosen.prompt_spread + trials[rival].spread
    if its_s <= (1.0 + max(_LEAST_DOUBT, spread)) * rival_s:
        return ""
    return (
        f"T(1) is {milliseconds(its.seconds)} with {n} tokens at once, which makes {rival} faster"
    )
