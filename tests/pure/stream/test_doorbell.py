"""When split layers run without a wait of the host."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.ggml.graph import Graph
from offload.ggml.hostbuffer import CpuBufferType
from offload.ggml.tensor import Buffer, Tensor, new_tensor
from offload.stream import doorbell
from offload.stream.doorbell import (
    CannotRing,
    FirstDecodes,
    RingChoice,
    results_in_turns,
    waits_inside,
)

seconds = st.floats(0.0, 1e-2)


@given(st.lists(seconds, max_size=60), st.integers(1, 100))
def test_a_doorbell_pays_while_streaming_would_save_less_than_a_wait_costs(
    before_s: list[float], n_layers: int
) -> None:
    """It follows the decodes, whatever came before."""
    choice = RingChoice()
    assert choice.pays, "before anything is known"
    for left_s in before_s:
        choice.saw(n_layers, n_layers * left_s, 1.0, rang=choice.pays)
    for _ in range(doorbell.FIRST_TRIAL - 1):
        choice.saw(n_layers, 0.0, 1.0, rang=choice.pays)
    assert choice.pays or len(before_s) > 0
    for _ in range(60):
        choice.saw(n_layers, n_layers * 1e-3, 1.0, rang=choice.pays)
    assert not choice.pays


def ways(choice: RingChoice, n: int, ringing_s: float, waiting_s: float) -> list[bool]:
    """The ways of `n` decodes, which take these times."""
    found = []
    for _ in range(n):
        found.append(choice.pays)
        choice.saw(4, 0.0, ringing_s if found[-1] else waiting_s, rang=found[-1])
    return found


@given(st.floats(1e-3, 1.0), st.floats(0.2, 5.0))
def test_the_faster_way_is_taken_most_of_the_time(ringing_s: float, ratio: float) -> None:
    choice = RingChoice()
    found = ways(choice, 3000, ringing_s, ratio * ringing_s)
    n_ringing = sum(found[500:])
    if ratio > 1.05:
        assert n_ringing > 0.95 * 2500
    elif ratio < 0.95:
        assert n_ringing < 0.05 * 2500
    assert found[0]
    assert 0 < sum(found) < 3000, "both ways are timed"


def test_the_way_follows_a_change() -> None:
    choice = RingChoice()
    assert sum(ways(choice, 2000, 1.0, 1.2)[500:]) > 1400
    assert sum(ways(choice, 9000, 1.0, 0.8)[7000:]) < 200


def test_a_decode_that_cannot_ring_is_no_trial() -> None:
    choice = RingChoice()
    for _ in range(500):
        choice.saw(4, 0.0, 1.0, rang=False)
    assert choice.pays


def test_the_first_decodes_and_those_after_a_pause_are_careful() -> None:
    """ggml captures a graph in its third decode at the latest, and frees it after 10 s."""
    first = FirstDecodes()
    careful = [first.is_careful(0.1 * n) for n in range(50)]
    n = careful.index(False)
    assert 3 <= n <= 8
    assert not any(careful[n:])
    assert not first.is_careful(4.9 + 4.0)
    assert first.is_careful(4.9 + 4.0 + 9.9), "just before ggml frees what is not used"
    assert sum(first.is_careful(19.0 + 0.1 * n) for n in range(50)) == n - 1


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


@pytest.mark.parametrize(("n_tokens", "rings"), [(8, True), (9, False)])
def test_layers_with_too_many_rows_wait(n_tokens: int, rings: bool) -> None:
    """Each token has a row of 16 KiB for each of 4 experts, and 512 KiB are allowed."""
    split = SimpleNamespace(
        host=SimpleNamespace(is_pinned=True),
        weights=SimpleNamespace(sources=[SimpleNamespace(type="q4_K")]),
        output=SimpleNamespace(shape=(4096, 4, n_tokens, 1)),
    )
    step: Any = SimpleNamespace(split=split, readers=[None], n_used=4, n_tokens=n_tokens)
    refusal = nullcontext() if rings else pytest.raises(CannotRing, match="MiB of rows")
    with refusal:
        doorbell._check([step])


@pytest.mark.parametrize("by_view", [False, True])
@pytest.mark.parametrize("late", [None, 0, 1, 2])
def test_results_with_the_same_memory_are_read_in_turns(late: int | None, by_view: bool) -> None:
    """A result of layer 0 that is read after layer 1 made its own is refused."""
    buffer = Buffer(CpuBufferType().address, 4096, "results")

    def node(op: str, *sources: Tensor) -> Tensor:
        return new_tensor("f32", (4, 1, 1, 1), (buffer, 0), op, sources)

    try:
        given, order, roots = node("NONE"), list[Tensor](), list[int]()
        for layer in range(2):
            results = [node("SCALE", given) for _ in range(3)]
            order += results
            roots += [result.address for result in results]
            if layer == 0:
                first = [node("SQR", result) for result in results]
                order += first
                late_one = None if late is None else results[late]
        if late_one is not None:
            view = node("VIEW", late_one)
            order += [view, node("SQR", view)] if by_view else [node("SQR", late_one)]
            with pytest.raises(CannotRing, match="are read in a later layer"):
                results_in_turns(Graph.of(order), roots)
        else:
            found = results_in_turns(Graph.of(order), roots)
            assert [result[0] for of in found for result in of] == [
                *roots[::3],
                *roots[1::3],
                *roots[2::3],
            ]
    finally:
        buffer.close()
