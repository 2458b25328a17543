"""The measured time of a draft's token is what a virtual clock says, whatever else runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fake_target import FakeTarget
from parts import FakeBlockModel

from specoffload.opening.draft_model import measure_step

STEP_S, COLD_S, DISTURBED_S = 0.25, 3.0, 40.0


class Clocked:
    """A draft model's clock. Tokens before the warm-up's end are slow, as is one after it."""

    def __init__(self, n_cold: int, disturbed: int) -> None:
        self.now_s, self._n = 0.0, 0
        self._n_cold, self._disturbed = n_cold, disturbed

    def tick(self, n_steps: int) -> None:
        self._n += 1
        once_s = COLD_S if self._n <= self._n_cold else STEP_S
        self.now_s += n_steps * once_s
        self.now_s += DISTURBED_S if self._n == self._disturbed else 0.0


class Model(FakeTarget):
    def __init__(self, clock: Clocked) -> None:
        super().__init__()
        self._clock = clock

    def extend(self, sequence: int, tokens: Sequence[int], n_logits: int | None = None) -> Any:
        self._clock.tick(len(tokens))
        return super().extend(sequence, tokens, n_logits)


class Blocks(FakeBlockModel):
    def __init__(self, clock: Clocked) -> None:
        super().__init__()
        self._clock = clock

    def draft(self, parts: Any, n_steps: int, *rest: Any) -> Any:
        self._clock.tick(n_steps)
        return super().draft(parts, n_steps, *rest)


@pytest.mark.parametrize("disturbed", [0, 20])
def test_a_step_is_timed_after_the_warm_up_and_without_an_interruption(disturbed: int) -> None:
    clock = Clocked(n_cold=10, disturbed=disturbed)
    text = [*range(60)]
    assert measure_step(Model(clock), text, 0, lambda: clock.now_s) == STEP_S
    assert clock.now_s < 100.0


@pytest.mark.parametrize("disturbed", [0, 5])
def test_a_step_of_blocks_is_a_blocks_share(disturbed: int) -> None:
    clock = Clocked(n_cold=2, disturbed=disturbed)
    assert measure_step(Blocks(clock), [*range(60)], 0, lambda: clock.now_s) == STEP_S
