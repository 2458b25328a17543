"""When split layers run without a wait of the host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.player.doorbell import RingChoice, waits_inside

seconds = st.floats(0.0, 1e-2)


@given(st.lists(seconds, max_size=60), st.integers(1, 100))
def test_a_doorbell_pays_while_streaming_would_save_less_than_a_wait_costs(
    before_s: list[float], n_layers: int
) -> None:
    """It follows the decodes, whatever came before."""
    choice = RingChoice()
    assert choice.pays, "before anything is known"
    for left_s in before_s:
        choice.saw(n_layers, n_layers * left_s)
    for _ in range(60):
        choice.saw(n_layers, 0.0)
    assert choice.pays
    for _ in range(60):
        choice.saw(n_layers, n_layers * 1e-3)
    assert not choice.pays


@pytest.mark.parametrize(
    ("types", "n_tokens", "waits"),
    [
        ({"q4_K", "q6_K"}, 1, False), ({"q4_K", "q6_K"}, 63, False), ({"q4_K"}, 64, True),
        ({"iq1_m"}, 1, False), ({"iq1_m"}, 2, True), ({"iq1_m", "q4_K"}, 2, True),
        ({"bf16"}, 1, True), ({"q4_K", "f16"}, 1, True), ({"mxfp4"}, 8, False),
    ],
)  # fmt: skip
def test_products_in_which_the_backend_waits_by_itself(
    types: set[str], n_tokens: int, waits: bool
) -> None:
    assert waits_inside(types, n_tokens) == waits
