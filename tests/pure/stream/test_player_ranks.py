"""The player's cache rule, in C, gives the ranks of offload/schedule/cache.py."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from player_memory import Machine, some_sizes
from wide import examples

from offload.ggml import player as api
from offload.schedule.cache import NEVER, Lrfu

# half-life in uses, experts of a token, experts from which a use counts as one of a prompt, and
# uses that do not count as time
rules = st.tuples(st.floats(0.5, 500.0), st.integers(1, 6), st.integers(0, 12), st.integers(0, 5))


class Counting(Machine):
    """A machine that notes the layers whose uses Python counts, because it gave them slots."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.by_python: list[int] = []

    def _take_slots(self, layer: Any) -> None:
        super()._take_slots(layer)
        self.by_python.append(int(layer.layer))

    def choose_experts(self) -> list[list[int]]:
        """Let the routers choose others. Return the experts that each layer's tokens use."""
        used = []
        for layer, ids in zip(self.layers, self.ids.values(), strict=True):
            chosen = set[int]()
            for t in range(layer.n_tokens):
                row = self.rng.sample(range(layer.n_experts), layer.n_used)
                ids[t * layer.ids_stride :][: layer.n_used] = row
                chosen.update(row)
            used.append(sorted(chosen))
        return used


@settings(deadline=None, max_examples=examples(300))
@given(st.integers(0, 2**32), rules, st.integers(1, 12), st.booleans())
def test_the_player_ranks_experts_as_the_rule_does(
    seed: int, numbers: tuple[float, int, int, int], n_decodes: int, rings: bool
) -> None:
    rng = Random(seed)
    layers = [some_sizes(rng) for _ in range(rng.randint(1, 3))]
    for sizes in layers:
        sizes.is_split |= rings
    made = Counting(layers, rng, layers_per_wait=rng.choice((1, 2, 3)), rings=rings)
    half_life, n_used, n_scan, skipped = numbers
    rule = Lrfu(half_life, n_used, n_scan)
    player, n_uses, n_counted = made.player, 0, 0
    player.half_life, player.rule_used, player.rule_scan = rule.half_life, rule.n_used, rule.n_scan
    player.rule_skipped = rule.skipped = skipped
    player.whole = 0
    for tables in made.tables:
        tables["rank"][...] = NEVER
    for _ in range(n_decodes):
        used = made.choose_experts()
        made.by_python.clear()
        assert made.play() == api.DONE
        for layer, experts in enumerate(used):
            if layer not in made.by_python:
                n_uses, n_counted = n_uses + 1, n_counted + len(experts)
                rule.touched([(layer, expert) for expert in experts], n_uses)
        assert player.use == n_uses
        for layer, tables in enumerate(made.tables):
            expected = [rule.rank((layer, expert)) for expert in range(len(tables["rank"]))]
            assert np.array_equal(tables["rank"], expected), (layer, n_counted)
