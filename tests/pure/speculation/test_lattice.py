"""Trees of a block's candidates: what they gain by replay, and that they change no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from fake_target import FakeTarget
from parts import OwnDraws, generated, member_of, plain

from lab.lattice import PAGE, Branches, every_curve, replay, row
from lab.trees import load
from offload.decode import Rows
from specdec.costs.profile import CostProfile
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.drafters.rows import BlockDrafter
from specdec.policies.throughput import Throughput
from specdec.types import Round

STREAMS, DENSE, MIXTURE = "streams (modelled)", "mistral-large-2411", "deepseek-r1-0528-q4_x"
N_VOCAB = 12
FLAT = CostProfile(tuple(1.0 + 0.001 * n for n in range(64)), 0.05)


@pytest.mark.parametrize("name", [STREAMS, DENSE, MIXTURE])
def test_the_page_has_what_the_replay_gives(name: str) -> None:
    assert row(name, every_curve()[name], load()) in PAGE.read_text("utf-8").splitlines()


def test_trees_gain_where_rows_are_cheap_even_if_they_end_with_siblings() -> None:
    """Over 5 % is what they are built for. Where rows are dear, chains are drafted."""
    recorded, curves = load()["greedy"], every_curve()
    for name, least in ((STREAMS, 1.05), (DENSE, 1.05), (MIXTURE, 0.99)):
        chain, *trees = [replay(recorded, curves[name], branches).rate for branches in Branches]
        for tree in trees:
            assert tree >= least * chain
        if name == MIXTURE:
            assert trees == [chain, chain]


# -- drafting --------------------------------------------------------------------------------------


@dataclass
class Lattice:
    """A block that scores the text's own tokens high, and often others of a place higher."""

    text: Sequence[int]

    def _row(self, index: int, before: int | None) -> Rows:
        noise = np.random.default_rng([index, *self.text[: index + 1], before or 0])
        row = noise.normal(0, 2.0, N_VOCAB)
        row[self.text[index]] += 3.0
        return row.astype(np.float32)

    def place(self, index: int, before: int | None) -> tuple[Rows, float | None]:
        return self._row(index, before), None

    def successors(self, index: int, before: int | None) -> list[tuple[int, float]]:
        logits = self._row(index, before)
        p = np.exp(logits - logits.max())
        best = np.argsort(-logits)[:4]
        return list(zip(best.tolist(), (p[best] / p[best].sum()).tolist(), strict=True))


class Blocks(FakeTarget):
    """A block draft that needs no rows, since it knows the target."""

    first, most_drafted, n_passes = 0, 7, 0
    history: Sequence[int] = ()

    def __init__(self, *, has_lattice: bool) -> None:
        super().__init__(n_vocab=N_VOCAB)
        self.has_lattice = has_lattice

    def tail(self, sequence: int, history: Sequence[int]) -> list[int]:
        self.history = [*history]
        return [*history[-1:]]

    def take_in(self, sequences: Sequence[int], *, least: int = 0) -> None:
        pass

    def keep_recent(self, sequence: int, most: int, kept: int) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass

    def draft_blocks(
        self, parts: Sequence[tuple[int, Sequence[int]]], n_tokens: int
    ) -> list[Lattice]:
        self.n_passes += 1
        return [Lattice(plain(self, self.history, n_tokens)[len(self.history) :]) for _ in parts]


def pair(*, has_lattice: bool = True, **more: object) -> tuple[FakeTarget, BlockDrafter, Blocks]:
    target, layers = FakeTarget(n_vocab=N_VOCAB, n_tree_leaves=63), Blocks(has_lattice=has_lattice)
    return target, BlockDrafter(layers, name="dflash", **more), layers  # type: ignore[arg-type]


def test_a_lattice_gives_trees_of_one_pass_that_change_no_text() -> None:
    lengths, texts = {}, {}
    for has_lattice in (False, True):
        target, drafter, layers = pair(has_lattice=has_lattice)
        rounds = [*generated(target, [1, 2], 300, drafter, Throughput(FLAT))]
        assert any(r.draft.parents for r in rounds) == has_lattice
        drafted = [r.draft for r in rounds if r.draft.n_steps]
        assert {draft.n_steps for draft in drafted} == {1}
        assert layers.n_passes == len(drafted)
        assert max(draft.n_deep for draft in drafted) <= layers.most_drafted
        lengths[has_lattice] = 300 / len(rounds)
        texts[has_lattice] = [token for r in rounds for token in r.emitted]
    assert texts[False] == texts[True] == plain(FakeTarget(n_vocab=N_VOCAB), [1, 2], 300)[2:]
    assert lengths[True] > 1.1 * lengths[False]


def test_no_tree_follows_an_image() -> None:
    """Its tokens may share positions, and then the target refuses trees."""
    target, drafter, _ = pair()
    loop = DecodingLoop(target, ChainDrafting(target, drafter, Throughput(FLAT)))
    loop.add(member_of(0, [1, 2, 3], 60, images=((0, 1),)))
    rounds: list[Round] = []
    while not loop.is_idle:
        step = loop.step()
        assert not step.failed
        rounds += [round_ for _, round_ in step.rounds]
    assert any(round_.draft.tokens for round_ in rounds)
    assert not any(round_.draft.parents for round_ in rounds)


def test_a_shorter_block_has_no_deeper_tree_and_drawn_tokens_none() -> None:
    target, drafter, _ = pair(n_max=2)
    rounds = [*generated(target, [1, 2], 200, drafter, Throughput(FLAT))]
    assert any(r.draft.parents for r in rounds)
    assert max(r.draft.n_deep for r in rounds) == 2
    _, drafter, _ = pair(sampling=OwnDraws(1))
    assert not drafter._may_branch


def test_a_tree_of_a_block_costs_its_pass() -> None:
    policy = Throughput(FLAT)
    walk = policy.begin(7, "dflash")
    growth = policy.growth(walk, "dflash", 63, 7)
    assert growth is not None
    growth.add(-1, [(1, 0.6), (2, 0.3)])
    policy.grown(walk, growth, 1, 1)
    assert walk.spent == pytest.approx(policy.rate * FLAT.draft_step_s)
