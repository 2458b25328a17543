"""Which experts are in memory, if not all of them fit. Nothing is read."""

from __future__ import annotations

import random

from offload.store.residency import LayerExpert, Residency

N_LAYERS, N_EXPERTS, N_USED = 4, 32, 2


class Played:
    """Plays batches as the expert memory does, without files."""

    def __init__(self, n_places: int) -> None:
        sizes = dict.fromkeys(range(N_LAYERS), 10)
        self.residency = Residency(sizes, N_EXPERTS, N_USED, 10 * n_places)
        self.n_missing = 0

    def use(self, layer: int, experts: list[int]) -> None:
        pieces = [(layer, expert) for expert in experts]
        missing = self.residency.touch(pieces, is_scan=self.residency.are_many(len(pieces)))
        self.n_missing += len(missing)
        left = set(self.residency.victims(10 * len(missing), [set(pieces)]))
        assert not left & set(pieces)
        for piece in missing:
            assert self.residency.fits(piece)
            self.residency.add(piece)
        assert self.residency.used_bytes == 10 * len(self.residency)

    def holds(self, pieces: list[LayerExpert]) -> list[bool]:
        return [piece in self.residency for piece in pieces]


def test_memory_is_never_exceeded_and_holds_what_was_used_last() -> None:
    played, chance = Played(40), random.Random(1)
    for step in range(400):
        layer = step % N_LAYERS
        experts = sorted(chance.sample(range(N_EXPERTS), chance.choice([1, 2, 5, 20])))
        played.use(layer, experts)
        assert played.residency.used_bytes <= played.residency.capacity_bytes
        assert all(played.holds([(layer, expert) for expert in experts]))


def test_experts_that_decodes_use_stay_while_a_prompt_passes() -> None:
    played = Played(2 * N_EXPERTS + 8)
    often = [(layer, expert) for layer in range(N_LAYERS) for expert in (1, 2)]
    for _ in range(30):
        for layer in range(N_LAYERS):
            played.use(layer, [1, 2])
    for _ in range(20):
        for layer in range(N_LAYERS):
            played.use(layer, list(range(N_EXPERTS)))
    assert all(played.holds(often))


def test_a_prompt_finds_what_the_last_one_left() -> None:
    n_places = 2 * N_EXPERTS + 8
    played = Played(n_places)
    for _ in range(5):
        played.n_missing = 0
        for layer in range(N_LAYERS):
            played.use(layer, list(range(N_EXPERTS)))
    n_kept = n_places - N_EXPERTS  # all but the experts of the layer that is computed
    assert played.n_missing == N_LAYERS * N_EXPERTS - n_kept


def test_often_used_experts_stay_longer_than_those_used_once() -> None:
    played = Played(12)
    for i in range(200):
        played.use(0, [0, 1])
        played.use(1, [i % N_EXPERTS])
    assert all(played.holds([(0, 0), (0, 1)]))
    assert played.n_missing == 2 + 200, "those used once are always missing, the others never"


def test_pieces_that_must_stay_are_not_evicted_even_if_too_little_fits() -> None:
    residency = Played(4).residency
    for expert in range(4):
        residency.add((0, expert))
    kept: set[LayerExpert] = {(0, 0), (0, 1)}
    assert set(residency.victims(30, [kept])) == {(0, 2), (0, 3)}
    assert residency.used_bytes == 20
    assert not list(residency.victims(30, [kept]))
    assert set(residency.victims(40, [])) == kept


def test_a_prompt_is_likely_to_use_what_its_last_batch_used_and_then_what_decodes_use() -> None:
    played = Played(4 * N_EXPERTS)
    assert len(played.residency.likely(1, N_EXPERTS)) == N_EXPERTS
    for _ in range(3):
        played.use(1, [3])
    played.use(1, list(range(10, 30)))
    likely = played.residency.likely(1, 21)
    assert set(likely[:20]) == {(1, expert) for expert in range(10, 30)}
    assert likely[20] == (1, 3)
