"""Finds choices of `tune` that the decodes of later runs contradict.

`tune` scores each trial by several times. A choice is doubted if a later T(1), in place of the one
of its own trial, makes its score worse than the next best choice's by more than both spreads. A
run's T(1) counts as its start measured it or as serving corrected it, whichever is less: a longer
text makes decodes slower, too.
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
    runs: Iterable[KeptRun], settings: Mapping[str, str], sharing: Sharing, after: str
) -> OneToken | None:
    """Return the decode of the newest run with these settings and slots, measured after a day.

    Decodes of that day itself may be older than the choice, since only the day is kept.
    """
    for run in [*runs][::-1]:
        if not settings.items() <= run.settings.items() or not _as_many(run.sharing, sharing):
            continue
        decode = one_token(run)
        if decode is not None and decode.date > after:
            return decode
    return None


def _as_many(one: Sharing, other: Sharing) -> bool:
    return alike(replace(one, n_dense_streamed=other.n_dense_streamed), other)


def threads_doubt(tuned: TuneResult, runs: Sequence[KeptRun]) -> str:
    """Return a clause on why the chosen threads and placement are doubted, or "".

    `runs`: those of the model with which the choice was measured.
    """
    trials = [trial for trial in tuned.trials if 1 in trial.seconds]
    chosen = next((trial for trial in trials if trial.candidate == tuned.best), None)
    others = [trial for trial in trials if trial.candidate != tuned.best]
    if chosen is None or not others or not tuned.settings:
        return ""
    sharing = Sharing(tuned.n_slots, tuned.n_resident)
    decode = _newest(runs, tuned.settings, sharing, tuned.date)
    if decode is None:
        return ""
    now = replace(chosen, seconds={**chosen.seconds, 1: decode.seconds})
    rival = min(others, key=lambda trial: trial.score_s)
    spread = max(_LEAST_DOUBT, decode.spread + max(rival.spreads.values(), default=0.0))
    if now.score_s <= (1.0 + spread) * rival.score_s:
        return ""
    return (
        f"T(1) is {milliseconds(decode.seconds)} with {tuned.best}, which makes {rival.candidate} "
        f"faster ({rival.times} when it was tried)"
    )


def ubatch_doubt(tuned: KeptUbatch, runs: Sequence[KeptRun]) -> str:
    """Return a clause on why the chosen ubatch is doubted, or "". `runs`: those of the model."""
    trials, n, work = levelled(tuned.trials), tuned.n_ubatch, tuned.work
    if n not in trials or len(trials) < 2 or not tuned.run or work is None:
        return ""
    chosen = trials[n]
    slots = chosen.n_slots, chosen.n_resident
    decode = _newest(runs, {**tuned.run, "ubatch": str(n)}, Sharing(*slots), tuned.date)
    if decode is None:
        return ""
    # Ubatches that leave the same slots decode alike, so the later T(1) is theirs, too.
    now = {
        m: replace(trial, decode_s=decode.seconds)
        if (trial.n_slots, trial.n_resident) == slots
        else trial
        for m, trial in trials.items()
    }
    rival = min(now.keys() - {n}, key=lambda m: now[m].seconds(work))
    spread = max(_LEAST_DOUBT, decode.spread + chosen.prompt_spread + now[rival].spread)
    if now[n].seconds(work) <= (1.0 + spread) * now[rival].seconds(work):
        return ""
    return (
        f"T(1) is {milliseconds(decode.seconds)} with {n} tokens at once, which makes {rival} "
        "faster"
    )
