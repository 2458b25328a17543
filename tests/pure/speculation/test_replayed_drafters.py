"""The default policy over several drafters is at least 0.99 of the best of them alone.

The drafts are recorded, not invented: those of the embedded target's own layer, of its draft model
and of n-gram drafters, at every token of 24 held-out texts. Curves T(n) are measured. As `bench`
does, each run first writes all texts once to learn.
"""

from __future__ import annotations

from statistics import fmean

import pytest

from lab.drafters import SHARES, compare, load, replay
from specdec.costs.profile import CostProfile


def test_all_drafters_together_are_near_the_best_of_them_alone() -> None:
    """`-s` shows each case: measured curves, and two pairs of times of the drafters' steps.

    Without n-grams, a drafter that is a little better is told apart only after long texts.
    """
    recording = load()
    for i, ngrams in enumerate(("ngram-mod", "suffix")):
        rows = compare(recording, ("mtp", "draft", ngrams), pairs=SHARES[i::2])
        for row in rows:
            alone = ", ".join(f"{name} {rate:.2f}" for name, rate in row.alone.items())
            told = f"{alone}, together {row.chain:.2f}: {row.ratio:.3f}"
            print(f"{row.curve}, steps {row.steps}: {told}")
        assert min(row.ratio for row in rows) >= 0.99
        assert fmean(row.ratio for row in rows) >= 1.05
    rows = compare(recording, ("mtp", "draft"))
    assert min(row.ratio for row in rows) >= 0.88
    assert sum(row.ratio >= 0.99 for row in rows) >= 16
    assert fmean(row.ratio for row in rows) >= 0.985


@pytest.mark.parametrize("best", ["mtp", "draft"])
def test_the_drafter_whose_step_is_cheap_writes_most(best: str) -> None:
    curve = CostProfile(tuple(1.0 + 0.05 * n for n in range(16)))
    steps = {"mtp": 0.5, "draft": 0.5} | {best: 0.02}
    run = replay(load(), ("mtp", "draft"), curve, steps, 2)
    assert run.n_by[best] > 0.9 * run.n_accepted
