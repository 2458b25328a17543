"""Sampled speculation has the target's distribution, by chi-square tests of 50,000 draws each."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fake_target import FakeTarget
from numpy.typing import NDArray
from parts import FakeBlockModel, Silent, generated, never
from speculation_parts import Sampler, proposed

from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import MatchAcceptance, RejectionAcceptance, draw, residual
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.model import ModelDrafter
from specdec.policies.rules import Fixed, PMin
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, DraftRequest, Policy

N_DRAWS = 50_000
N_VOCAB = 6
N_TEXTS = 2_000
# Chi-square values that chance exceeds once in a million times, by degrees of freedom.
RARE = {1: 23.93, 2: 27.63, 3: 30.66, 4: 33.38, 5: 35.89}
CHAINS = {
    "flat": {"temperature": 1.5},
    "top-k": {"temperature": 0.5, "top_k": 3},  # excludes tokens
}


class OneSampling:
    """One temperature and the same random numbers for every sequence."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def rng(self, sequence: int) -> np.random.Generator:
        return self._rng

    def temperature(self, sequence: int) -> float:
        return 1.3


def check(counts: np.ndarray, expected: np.ndarray) -> None:  # type: ignore[type-arg]
    """Check counts [n_vocab] by chi-square at one in a million. Impossible tokens must have 0."""
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0] * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < RARE[max(1, len(counts) - 1)]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("method", ["match", "reject", "reject-certain"])
def test_the_first_two_tokens_are_distributed_as_without_a_draft(chain: str, method: str) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 1.5, (3, N_VOCAB)).astype(np.float32)
    sampler = Sampler(**CHAINS[chain], rng=rng)
    p = [sampler.probabilities(row) for row in logits]
    # Distributions of the two drafted tokens, which differ from the target's.
    q = [rng.dirichlet(np.ones(N_VOCAB)) for _ in range(2)]
    acceptance = (
        MatchAcceptance(sampler) if method == "match" else RejectionAcceptance(sampler, rng)
    )
    first = [0] * N_VOCAB
    second = [0] * N_VOCAB
    drawn = [
        np.minimum(np.searchsorted(np.cumsum(row), rng.random(N_DRAWS), side="right"), N_VOCAB - 1)
        for row in q
    ]
    if method == "reject-certain":
        drawn = [np.full(N_DRAWS, row.argmax()) for row in q]
    rows = tuple(q) if method == "reject" else ()
    drafts = {
        pair: Draft(pair, (0.5, 0.5), "draft", Decision(2, ""), (), rows)
        for pair in itertools.product(range(N_VOCAB), repeat=2)
    }
    for pair in zip(*(row.tolist() for row in drawn), strict=True):
        emitted = acceptance(drafts[pair], logits, [0], never).emitted
        first[emitted[0]] += 1
        if len(emitted) > 1:
            second[emitted[1]] += 1
    check(np.array(first), p[0])
    # Here the second token's distribution does not depend on the first token. It must not depend
    # on whether the first was accepted either.
    check(np.array(second), p[1])


class Skewed:
    """A distribution whose drafted tokens are `factor` times as likely as they should be."""

    def __init__(self, p: Sequence[float], factor: float = 1.0) -> None:
        self._p = np.array(p)
        self._p[0] *= factor

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        return self._p

    def accepted(self, token: int) -> None:
        pass


def surprise(factor: float, rows: tuple[NDArray[np.float64], ...], n: int = 40_000) -> float:
    """Standard deviations between the accepted drafts and min(1, p/q) = 0.9 of `n` drafts.

    A share of 0.9 has a deviation of 0.17 % of itself, so an error of 1 % has 6 deviations.
    """
    said = float(rows[0][0]) if rows else 1.0
    p = [0.9 * said, (1.0 - 0.9 * said) * 0.75, (1.0 - 0.9 * said) * 0.25]
    judge = RejectionAcceptance(Skewed(p, factor), np.random.default_rng(11))
    draft = Draft((0,), (0.5,), "draft", Decision(1, ""), (), rows)
    logits = np.zeros((2, 3), np.float32)
    n_accepted = sum(judge(draft, logits, [0], never).n_accepted for _ in range(n))
    return (n_accepted - 0.9 * n) / math.sqrt(0.9 * 0.1 * n)


@pytest.mark.parametrize("q", [(), (0.8, 0.1, 0.1), (0.3, 0.3, 0.4)], ids=str)
def test_drafts_are_accepted_as_often_as_they_should_be(q: tuple[float, ...]) -> None:
    rows = (np.array(q),) if q else ()
    assert abs(surprise(1.0, rows)) < 3.5
    for factor in (0.99, 1.01):
        assert abs(surprise(factor, rows)) > 3.5, "the test sees an error of 1 %"


def jagged() -> CostProfile:
    """Costs at which batches of 2 and 3 tokens do not pay, but one of 4 does."""
    return CostProfile((1.0, 1.9, 2.6, 1.3, 2.4), draft_step_s=0.05)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(3),
    "p-min": lambda: PMin(n_max=3, p_min=0.5),
    "throughput": lambda: Throughput(jagged()),
}


class Habitual(Silent):
    """Always drafts token 2 with p 0.6, in competition with the draft model."""

    name = "habit"

    def _propose(self, asked: DraftRequest) -> Draft:
        return self._offer(asked, [2, 2, 2], [0.6, 0.6, 0.6])


@pytest.mark.parametrize(
    ("policy", "n_steps_max"), [("fixed", 0), ("p-min", 16), ("throughput", 0), ("throughput", 16)]
)
def test_a_sampled_model_draft_keeps_the_distribution_through_the_loop(
    policy: str, n_steps_max: int
) -> None:
    """With `n_steps_max` 0 the draft model is asked token by token, otherwise for blocks."""
    rng = np.random.default_rng(3)
    sampler = Sampler(0.9, rng=rng)
    pairs = np.zeros((4, 4))
    target = FakeTarget(n_vocab=4, logits_seed=5, order=1)
    draft = FakeTarget(n_vocab=4, logits_seed=6, order=1)
    if n_steps_max:
        draft = FakeBlockModel(n_steps_max, n_vocab=4, logits_seed=6, order=1)
    drafter = ModelDrafter(draft, sampling=OneSampling(rng))
    deciding = POLICIES[policy]()
    lengths = Counter[int]()
    for _ in range(N_TEXTS):
        target.rewind(0, 0)
        text = [0]
        for round_ in generated(
            target,
            [0],
            5,
            drafter,
            deciding,
            chooser=sampler,
            acceptance=RejectionAcceptance(sampler, rng),
        ):
            text += round_.emitted
            lengths[round_.n_drafted] += 1
        for a, b in zip(text, text[1:], strict=False):
            pairs[a, b] += 1
    assert sum(rounds for n, rounds in lengths.items() if n) > N_TEXTS / 2
    for a in range(4):
        check(pairs[a], sampler.probabilities(target.logits_after([a])))


def test_a_chain_that_prefers_some_draws_keeps_the_distribution() -> None:
    rng = np.random.default_rng(3)
    sampler = Sampler(0.9)
    target = FakeTarget(n_vocab=4, logits_seed=5, order=1)
    model = ModelDrafter(
        FakeTarget(n_vocab=4, logits_seed=6, order=1),
        sampling=OneSampling(rng),
    )
    acceptance = RejectionAcceptance(sampler, rng)
    first = np.zeros(4)
    sources = Counter[str]()
    for _ in range(4 * N_TEXTS):
        # After token 2 the model's draft is worth more than the habit's if the model drew a 0.
        draft = proposed(ChainDrafter([Habitual()], model), 0, [2], Fixed(3), 3)
        sources[draft.source] += 1
        rows = np.array([target.logits_after([t]) for t in (2, *draft.tokens)])
        first[acceptance(draft, rows, [2], never).emitted[0]] += 1
    assert min(sources["habit"], sources["draft"]) > N_TEXTS / 2
    check(first, sampler.probabilities(target.logits_after([2])))


def test_rejection_accepts_a_draft_that_is_the_target_itself() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1, (2, N_VOCAB)).astype(np.float32)
    sampler = Sampler(1.0, rng=rng)
    p = sampler.probabilities(logits[0])
    acceptance = RejectionAcceptance(sampler, rng)
    for _ in range(500):
        draft = Draft((draw(p, rng),), (0.5,), "draft", Decision(1, ""), (), (p,))
        assert acceptance(draft, logits, [0], never).n_accepted == 1


def test_the_residual_is_what_the_draft_left_over() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.7, 0.1, 0.2])
    assert residual(p, q, 0) == pytest.approx([0.0, 1.0, 0.0])
    assert residual(p, None, 0) == pytest.approx([0.0, 0.6, 0.4])
    assert residual(p, p, 0) == pytest.approx(p)


def test_an_end_token_accepted_inside_a_draft_ends_the_emission() -> None:
    logits = np.full((3, 4), -9, np.float32)
    logits[:, 2] = 9
    sampler = Sampler(0.0)
    for acceptance in (
        MatchAcceptance(sampler),
        RejectionAcceptance(sampler, np.random.default_rng(0)),
    ):
        draft = Draft((2, 2), (0.9, 0.9), "draft", Decision(2, ""))
        verdict = acceptance(draft, logits, [0], lambda t: t == 2)
        assert (verdict.n_accepted, verdict.emitted) == (1, [2])
