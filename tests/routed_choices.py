"""Shared by the tests of cached routing: the numpy form's choices beside a device's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from offload.engine import Engine
from offload.routing.routing import N_KEPT
from offload.schedule.cached_choice import ChoiceCounts, best, choose
from offload.stream.cached_routing import CachedRouting

Rows = NDArray[np.float32]


def routing_of(engine: Engine) -> CachedRouting:
    (device,) = engine.opened.devices
    assert device.routing is not None
    return device.routing


class SpiedChoices:
    """The choices of the numpy form, for the scores that the device's routers sorted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_group: dict[int, list[NDArray[np.intp]]] = {}
        self.n_other = 0  # layers of a batch in which a choice is not the router's own
        self._see = ChoiceCounts.see
        monkeypatch.setattr(ChoiceCounts, "see", lambda *its: self.seen(*its))

    def seen(
        self, counts: ChoiceCounts, group: int, scores: Rows, penalty: Rows,
        cached: NDArray[np.bool_], n_kept: int, n_used: int,
    ) -> None:  # fmt: skip
        chosen, own = choose(scores, penalty, n_kept, n_used), best(scores, n_used)
        self.by_group.setdefault(group, []).append(chosen)
        self.n_other += int((chosen != own).any())
        assert (penalty[cached] == 0).all()
        assert (np.sort(chosen[:, :n_kept]) == np.sort(own[:, :n_kept])).all() or n_used <= n_kept
        self._see(counts, group, scores, penalty, cached, n_kept, n_used)

    def assert_same(self, engine: Engine) -> None:
        """Compare with the ids by which the device computed the last tokens of each layer."""
        recorded = [*engine.opened.routing.recorded().values()]
        assert len(recorded) == len(self.by_group) > 0
        for layer, group in zip(recorded, sorted(self.by_group), strict=True):
            ours = np.concatenate(self.by_group[group])
            assert np.array_equal(layer, ours[-N_KEPT:])


def turn_on(engine: Engine) -> None:
    engine.opened.routing.is_on = routing_of(engine).is_on = True
