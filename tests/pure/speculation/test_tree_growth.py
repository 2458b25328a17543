"""Draft trees: how they grow, that they write the plain text, and when chains are drafted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from fake_target import FakeTarget
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from parts import OwnDraws, generated, member_of, plain

from lab.trees import Sizes, compare, curves, load
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy, RejectionAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.drafters.model import ModelDrafter
from specdec.policies.rules import DraftBounds
from specdec.policies.throughput import Throughput
from specdec.policies.tree import TreeGrowth, TreePrices
from specdec.types import Decision, Draft, Round

FLAT = CostProfile(tuple(1.0 + 0.001 * n for n in range(64)), 0.005)
STEEP = CostProfile(tuple(1.0 + 0.3 * n for n in range(64)), 0.005)


def growth(
    verify: Sequence[float], step: float = 0.0, row: float = 0.0, follow: float = 0.7, deep: int = 9
) -> TreeGrowth:
    return TreeGrowth(TreePrices(verify, step, row), lambda _, p: p, follow, deep)


# -- growing ---------------------------------------------------------------------------------------


@given(
    prices=st.lists(st.floats(0, 1.5), min_size=1, max_size=7),
    shares=st.lists(st.floats(0.01, 0.7), min_size=12, max_size=12),
)
def test_no_other_tree_of_the_nodes_has_more_value(
    prices: list[float], shares: list[float]
) -> None:
    grown = growth([0.0, *np.cumsum(prices)], follow=1.0)
    numbers = iter(shares)
    expand = [-1]
    while expand and len(grown.nodes) < 8:
        for node in expand:
            pair = [(10, next(numbers, 0.3)), (11, next(numbers, 0.2))]
            grown.add(node, sorted(pair, key=lambda x: -x[1]))
        expand = grown.ahead(1)
    nodes, value = grown.chosen()
    every = grown.nodes
    best = 0.0
    for n in range(1, min(len(every), len(prices)) + 1):
        for chosen in combinations(range(len(every)), n):
            if all(every[i].parent in (-1, *chosen) for i in chosen):
                total = sum(every[i].reached for i in chosen)
                best = max(best, total - sum(prices[:n]))
    assert value == pytest.approx(best, abs=1e-9)
    assert sum(node.reached for node in nodes) - sum(prices[: len(nodes)]) == pytest.approx(value)
    assert all(node.parent < i for i, node in enumerate(nodes))


def test_where_rows_are_free_all_likely_nodes_are_expanded_and_dear_rows_leave_none() -> None:
    free = growth([0.0] * 64)
    free.add(-1, [(1, 0.6), (2, 0.3), (3, 0.001)])
    assert free.ahead() == [0, 1]
    dear = growth([0.0, 0.7, 1.4, 2.1])
    dear.add(-1, [(1, 0.6), (2, 0.3)])
    assert dear.ahead() == []
    assert dear.chosen() == ((), 0.0)


def test_a_step_is_paid_for_by_the_nodes_that_it_finds() -> None:
    for step, expands in ((0.1, True), (0.6, False)):
        tree = growth([0.0] * 64, step, follow=0.5)
        tree.add(-1, [(1, 0.5)])
        assert bool(tree.ahead()) == expands


def test_a_jump_of_the_costs_is_crossed_where_later_levels_pay() -> None:
    # The second row costs a token, and further ones nothing.
    tree = growth([0.0, 0.5, 1.5, 1.5, 1.5, 1.5, 1.5], follow=0.9)
    tree.add(-1, [(1, 0.95)])
    assert tree.ahead() == [0]


def test_no_node_is_deeper_than_the_text_may_be_long() -> None:
    tree = growth([0.0] * 64, deep=2)
    tree.add(-1, [(1, 0.9)])
    (first,) = tree.ahead()
    tree.add(first, [(2, 0.9)])
    assert tree.ahead() == []
    assert [node.depth for node in tree.nodes] == [1, 2]


# -- decoding --------------------------------------------------------------------------------------


class Noisy(FakeTarget):
    """A draft whose likeliest token is often the target's second or third."""

    def logits_after(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        noise = np.random.default_rng(list(tokens[-2:])).normal(0, 1.2, self.n_vocab)
        return super().logits_after(tokens) + noise.astype(np.float32)


def pair(n_leaves: int = 63, **more: int) -> tuple[FakeTarget, ModelDrafter]:
    """A target whose logits are random, and a draft model that agrees with it roughly."""
    target = FakeTarget(n_vocab=12, logits_seed=1, order=2, n_tree_leaves=n_leaves, **more)
    return target, ModelDrafter(Noisy(n_vocab=12, logits_seed=1, order=2, n_tree_leaves=n_leaves))


def rounds_of(loop: DecodingLoop) -> list[Round]:
    """All rounds until the loop's members have ended."""
    rounds = []
    while not loop.is_idle:
        rounds += [round_ for _, round_ in loop.step().rounds]
    return rounds


def greedy(target: FakeTarget, prompt: Sequence[int], n: int) -> list[int]:
    text = list(prompt)
    for _ in range(n):
        text.append(int(target.logits_after(text).argmax()))
    return text


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 200),
    n=st.integers(0, 40),
    agreement=st.floats(0, 1),
    n_ctx=st.integers(6, 60),
    end=st.integers(0, 40),
    n_leaves=st.integers(1, 20),
)
def test_trees_write_the_plain_text(
    seed: int, n: int, agreement: float, n_ctx: int, end: int, n_leaves: int
) -> None:
    target = FakeTarget(n_vocab=16, seed=seed, n_ctx=n_ctx, n_tree_leaves=n_leaves)
    draft = FakeTarget(
        n_vocab=16, seed=seed, agreement=agreement, n_ctx=50, peak=0.4, n_tree_leaves=n_leaves
    )
    text = [1, 2, 3]
    for round_ in generated(target, text, n, ModelDrafter(draft), Throughput(FLAT), end=end):
        text = [*text, *round_.emitted]
        assert target.tokens(0) == text[:-1]
    assert text == plain(target, [1, 2, 3], n, end)


def test_a_tree_accepts_what_a_chain_would_have_missed() -> None:
    lengths = {}
    for n_leaves in (0, 63):
        target, drafter = pair(n_leaves)
        rounds = list(generated(target, [1, 2], 400, drafter, Throughput(FLAT)))
        assert bool(n_leaves) == any(r.draft.parents for r in rounds)
        lengths[n_leaves] = 400 / len(rounds)
        assert [t for r in rounds for t in r.emitted] == greedy(target, [1, 2], 400)[2:]
    assert lengths[63] > 1.3 * lengths[0]


@pytest.mark.parametrize("why", ["steep T(n)", "limits of the request", "draws", "rejection"])
def test_chains_are_drafted_where_trees_do_not_pay_or_are_not_exact(why: str) -> None:
    target, drafter = pair()
    policy = Throughput(STEEP if why == "steep T(n)" else FLAT)
    drafting = ChainDrafting(target, drafter, policy)
    loop = DecodingLoop(target, drafting)
    bounds = DraftBounds(p_min=0.01 if why == "limits of the request" else None)
    member = member_of(0, [1, 2], 100, bounds=bounds)
    if why == "rejection":
        member.accept = RejectionAcceptance(Certain(), np.random.default_rng(1))
    if why == "draws":
        model = Noisy(n_vocab=12, logits_seed=1, order=2, n_tree_leaves=9)
        draws = ModelDrafter(model, sampling=OwnDraws(1))
        loop = DecodingLoop(target, ChainDrafting(target, draws, policy, draws=True))
    loop.add(member)
    rounds = rounds_of(loop)
    assert not any(r.draft.parents for r in rounds)
    assert sum(r.n_drafted for r in rounds) > 0


class Certain:
    """A greedy sampler that can name its probabilities."""

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        return np.eye(len(logits))[int(logits.argmax())]

    def accepted(self, token: int) -> None:
        pass


def test_a_trees_size_follows_the_limit_of_its_request() -> None:
    for n_max in (3, 20):
        target, drafter = pair()
        loop = DecodingLoop(target, ChainDrafting(target, drafter, Throughput(FLAT)))
        loop.add(member_of(0, [1, 2], 100, bounds=DraftBounds(n_max=n_max)))
        assert max(r.n_drafted for r in rounds_of(loop)) == n_max


def test_requests_that_share_a_batch_and_steps_that_read_prompts_draft_chains() -> None:
    target, drafter = pair()
    loop = DecodingLoop(target, ChainDrafting(target, drafter, Throughput(FLAT)))
    members = [member_of(0, [1, 2], 60), member_of(1, [3], 25), member_of(2, [4] * 30, 60)]
    for member in members[:1]:
        loop.add(member)
    n_trees = [0, 0]
    while not loop.is_idle:
        if len(members[0].history) > 20 and members[1] not in loop.members and not members[1].end:
            loop.add(members[1])
            loop.add(members[2])
        step = loop.step(4)
        alone = len(step.rounds) == 1 and not step.read
        n_trees[alone] += sum(bool(r.draft.parents) for _, r in step.rounds)
    assert n_trees[0] == 0
    assert n_trees[1] > 3
    for member, prompt in zip(members, ([1, 2], [3], [4] * 30), strict=True):
        assert member.history == greedy(target, prompt, len(member.history) - len(prompt))


def test_a_tree_whose_judging_fails_leaves_target_and_draft_usable() -> None:
    class Failing(Greedy):
        n_left = 9

        def __init__(self, error: type[BaseException]) -> None:
            self.error = error

        def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
            self.n_left -= 1
            if not self.n_left:
                raise self.error
            return super().choose(logits, history)

    for error in (KeyboardInterrupt, ValueError):
        target, drafter = pair()
        policy, text = Throughput(FLAT), [1, 2, 3]
        rounds = generated(target, text, 40, drafter, policy, chooser=Failing(error))
        with pytest.raises(error):
            text.extend(token for round_ in rounds for token in round_.emitted)
        assert target.tokens(0) == text[:-1]
        for round_ in generated(target, text, 40, drafter, policy, n_cached=target.length(0)):
            text += round_.emitted
        assert text == greedy(target, [1, 2, 3], len(text) - 3)


def test_what_a_tree_shows_is_counted_by_rank_and_its_length_is_its_depth() -> None:
    draft = Draft(
        (7, 8, 9, 5), (0.6, 0.3, 0.9, 0.4), "draft", Decision(4, ""), parents=(-1, -1, 1, 2)
    )
    round_ = Round(draft, 2, (8, 9, 3), 0.0, 0.0)
    assert draft.n_deep == 3
    assert round_.evidence == ((0.6, False), (0.9, True), (0.4, False))
    assert draft.seen_in_tree((8, 9, 3)) == [
        (0, 0.6, False), (1, 0.3, True), (0, 0.9, True), (0, 0.4, False)
    ]  # fmt: skip
    target, drafter = pair()
    drafting = ChainDrafting(target, drafter, policy := Throughput(FLAT))
    loop = DecodingLoop(target, drafting)
    loop.add(member_of(0, [1, 2], 100))
    rounds = rounds_of(loop)
    trees = [r for r in rounds if r.draft.parents]
    counters = drafting.counters
    assert counters.tree_rounds == len(trees) > 5
    assert counters.tree_nodes == sum(r.n_drafted for r in trees)
    assert counters.tree_accepted == sum(r.n_accepted for r in trees)
    assert 0 < counters.tree_saved < counters.tree_accepted
    assert {"draft", "draft-1", "draft-2"} <= set(policy.calibration.sources)


# -- the simulator ---------------------------------------------------------------------------------


def test_replayed_trees_gain_where_batches_are_nearly_free_and_lose_nowhere() -> None:
    """What docs/log.md says of trees, for one price of a draft step."""
    rows = compare(load(), curves(), Sizes(), steps=(0.02,))
    ratios = {(row.curve, row.mode): row.ratio for row in rows}
    assert min(ratios.values()) > 0.985
    assert min(ratios["streams (modelled)", mode] for mode in ("greedy", "sampled")) > 1.25
    assert ratios["mistral-large-2411", "greedy"] > 1.15
    # A mixture keeps chains, because larger batches use more and more of its experts.
    assert ratios["deepseek-r1-0528-q4_x", "greedy"] == pytest.approx(1.0)
