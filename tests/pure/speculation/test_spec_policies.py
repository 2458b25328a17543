"""The policies that go by a rule."""

from __future__ import annotations

from specdec.policies.rules import Fixed, PMin
from specdec.types import Policy


def constant(policy: Policy, p: float, limit: int) -> tuple[int, int]:
    """(sampled, kept) when every token has probability p."""
    walk = policy.begin(limit, "draft")
    n, wants = 0, walk.wants
    while wants:
        wants = walk.feed(p)
        n += 1
    return n, walk.n_best


def test_p_min_drops_the_weak_token() -> None:
    walk = PMin(16, 0.75).begin(16, "draft")
    assert [walk.feed(p) for p in (0.9, 0.8, 0.3)] == [True, True, False]
    assert walk.n_best == 2
    new = PMin(16, 0.75).begin(16, "draft")
    new.feed(0.001)
    assert new.n_best == 0


def test_p_min_drops_drafts_shorter_than_n_min() -> None:
    walk = PMin(16, 0.5, n_min=3).begin(16, "draft")
    for p in (0.9, 0.9):
        walk.feed(p)
    assert walk.n_best == 0
    walk.feed(0.9)
    assert walk.n_best == 3


def test_fixed_drafts_its_block_and_never_more_than_the_limit() -> None:
    assert constant(Fixed(4), 0.01, 9) == (4, 4)
    assert constant(Fixed(4), 0.01, 2) == (2, 2)
    assert constant(Fixed(0), 1.0, 9) == (0, 0)
