"""The MLA permute switch decides: both forms mean the same, none overwrites what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from offload.mla.decision import (
    Dims,
    Form,
    LeftAlone,
    Memory,
    MlaCounters,
    Timing,
    ValueProjection,
    choose_crossover,
    decide,
    hopeless,
    is_value_projection,
    measured_sizes,
    strides,
    token_stride,
)

KV_LORA, V_DIM = 6, 3
FAR = 1 << 20


def swapped(shape: Dims) -> Dims:
    return shape[0], shape[2], shape[1], shape[3]


def projection(
    n_tokens: int,
    n_head: int = 4,
    n_streams: int = 1,
    *,
    token_major: bool = True,
    places: tuple[int, int, int] = (0, FAR, 2 * FAR),
) -> ValueProjection:
    """A site as the library builds it, at byte addresses of attended, product and output."""
    attended_ne = KV_LORA, n_tokens, n_head, n_streams
    if token_major:  # with flash attention: a permuted view
        attended_nb = swapped(strides(swapped(attended_ne), 4))
    else:
        attended_nb = strides(attended_ne, 4)
    product = Memory(
        (V_DIM, n_tokens, n_head, n_streams),
        strides((V_DIM, n_tokens, n_head, n_streams), 4),
        places[1],
    )
    output_ne = V_DIM, n_head, n_tokens, n_streams
    return ValueProjection(
        weight_ne=(KV_LORA, V_DIM, n_head, 1),
        attended=Memory(attended_ne, attended_nb, places[0]),
        product=product,
        permuted=Memory(swapped(product.ne), swapped(product.nb), places[1]),
        output=Memory(output_ne, strides(output_ne, 4), places[2]),
        adjacent=True,
        shared=False,
        streamed=False,
    )


def read(memory: NDArray[np.float32], ne: Dims, nb: Dims) -> NDArray[np.float32]:
    """Floats as ggml reads them; axes in numpy's order, the row last."""
    return as_strided(memory, shape=ne[::-1], strides=nb[::-1])


@given(
    n_tokens=st.integers(1, 9),
    n_head=st.integers(2, 5),
    n_streams=st.integers(1, 3),
    token_major=st.booleans(),
)
def test_both_forms_give_the_same_bytes_in_the_same_places(
    n_tokens: int, n_head: int, n_streams: int, token_major: bool
) -> None:
    site = projection(n_tokens, n_head, n_streams, token_major=token_major)
    assert is_value_projection(site)
    if token_stride(site.attended) is None:
        assert not token_major
        assert n_streams > 1
        assert n_tokens > 1
        assert decide(site, 10**9) is LeftAlone.UNEVEN_TOKENS
        with pytest.raises(ValueError, match="distance"):
            _ = site.vectors_nb
        return
    rng = np.random.default_rng(n_tokens)
    weight = rng.integers(-9, 9, (n_head, V_DIM, KV_LORA)).astype(np.float32)
    memory = rng.integers(-9, 9, KV_LORA * n_tokens * n_head * n_streams).astype(np.float32)
    attended = read(memory, site.attended.ne, site.attended.nb)
    product = np.einsum("hvk,shtk->shtv", weight, attended)  # exact: small whole numbers
    matrix_form = product.transpose(0, 2, 1, 3).ravel()
    vectors = read(memory, site.vectors_ne, site.vectors_nb)
    broadcast_form = np.einsum("hvk,thok->thov", weight, vectors).ravel()
    assert np.array_equal(matrix_form, broadcast_form)
    assert np.count_nonzero(matrix_form) > 0


def test_tokens_up_to_the_crossover_are_replaced_and_more_are_not() -> None:
    assert decide(projection(4), 4) is Form.DIRECT
    assert decide(projection(5), 4) is LeftAlone.ABOVE_CROSSOVER
    assert decide(projection(2, n_streams=3), 5) is LeftAlone.ABOVE_CROSSOVER, (
        "streams count together"
    )
    assert decide(projection(1), 0) is LeftAlone.ABOVE_CROSSOVER


def test_streamed_and_shared_sites_are_left_alone() -> None:
    assert decide(replace(projection(2), streamed=True), 9) is LeftAlone.STREAMED
    assert decide(replace(projection(2), shared=True), 9) is LeftAlone.SHARED


def test_an_output_over_the_attention_output_goes_by_the_memory_of_the_old_product() -> None:
    assert decide(projection(3, places=(0, FAR, 0)), 9) is Form.COPIED
    size = projection(3).attended.size_bytes
    assert decide(projection(3, places=(0, FAR, size - 1)), 9) is Form.COPIED
    assert decide(projection(3, places=(0, FAR, size)), 9) is Form.DIRECT
    assert decide(projection(3, places=(0, 8, 0)), 9) is LeftAlone.OVERLAP


def test_nodes_in_between_may_use_the_output_memory_so_it_is_written_last() -> None:
    assert decide(replace(projection(3), adjacent=False), 9) is Form.COPIED


@given(
    n_tokens=st.integers(1, 5),
    token_major=st.booleans(),
    places=st.tuples(*[st.integers(0, 600)] * 3),
    adjacent=st.booleans(),
)
def test_no_form_writes_where_it_still_reads(
    n_tokens: int, token_major: bool, places: tuple[int, int, int], adjacent: bool
) -> None:
    site = projection(n_tokens, token_major=token_major, places=places)
    site = replace(site, adjacent=adjacent)
    bytes_of = [
        set(range(m.data, m.data + 4 * int(np.prod(m.ne))))
        for m in (site.attended, site.product, site.output)
    ]
    attended, product, output = bytes_of
    decision = decide(site, 10**9)
    if decision is Form.DIRECT:
        assert not attended & output
    elif decision is Form.COPIED:
        assert not attended & product
        assert not product & output
    else:
        assert decision is LeftAlone.OVERLAP
        assert attended & output or not adjacent
        assert attended & product or product & output


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_ne": (KV_LORA, V_DIM, 1, 1)},
        {"weight_ne": (KV_LORA, V_DIM, 4, 2)},
        {"weight_ne": (KV_LORA, V_DIM, 2, 1)},  # a weight shared by groups of heads
        {"weight_ne": (KV_LORA + 1, V_DIM, 4, 1)},
        {"permuted": projection(3).product},  # not permuted at all
        {"output": Memory((V_DIM, 4, 2, 1), strides((V_DIM, 4, 2, 1), 4), FAR)},  # a part of it
        {"output": Memory((V_DIM, 4, 3, 1), (4, 16, 64, 192), FAR)},  # gaps
        {"output": Memory((V_DIM, 4, 3, 1), strides((V_DIM, 4, 3, 1), 2), FAR)},  # half floats
    ],
)
def test_other_shapes_are_not_value_projections(changes: dict[str, object]) -> None:
    assert is_value_projection(projection(3))
    assert not is_value_projection(replace(projection(3), **changes))  # type: ignore[arg-type]


def test_counters_tell_direct_copied_and_the_reasons_apart() -> None:
    counters = MlaCounters()
    one = MlaCounters.of(
        [Form.DIRECT, Form.COPIED, LeftAlone.STREAMED, LeftAlone.STREAMED, LeftAlone.OVERLAP]
    )
    counters.add(one)
    counters.add(one)
    assert (counters.replaced, counters.copied) == (4, 2)
    assert counters.left_alone == {LeftAlone.STREAMED: 4, LeftAlone.OVERLAP: 2}


def timings(gains: Sequence[float]) -> list[Timing]:
    """Batches 1, 2, 4, ... where the broadcast form is `gain` times as fast."""
    return [Timing(1 << i, gain, 1.0) for i, gain in enumerate(gains)]


@pytest.mark.parametrize(
    ("gains", "crossover"),
    [
        ((2.0, 2.0, 1.5, 0.5), 4),
        ((0.9, 0.8, 0.5), 0),
        ((1.2, 1.1, 1.3), 4),
        ((3.0, 0.9, 3.0, 0.4), 4),  # a single loss among wins is noise
        ((1.1, 0.5, 1.2, 0.5), 1),  # and a single win among losses too
        ((1.0, 1.0), 0),  # nothing gained: nothing changed
        ((), 0),
    ],
)
def test_the_crossover_is_where_the_broadcast_form_stops_winning(
    gains: Sequence[float], crossover: int
) -> None:
    assert choose_crossover(timings(gains)) == crossover


@given(st.lists(st.floats(0.1, 10), max_size=9), st.floats(0.01, 100))
def test_the_crossover_is_a_measured_batch_and_does_not_depend_on_order_or_unit(
    gains: list[float], unit: float
) -> None:
    table = timings(gains)
    chosen = choose_crossover(table)
    assert chosen in {0, *(timing.n_tokens for timing in table)}
    assert choose_crossover(table[::-1]) == chosen
    power = 2.0 ** round(np.log2(unit))  # scaling by powers of two is exact
    scaled = [Timing(t.n_tokens, t.matrix_s * power, t.broadcast_s * power) for t in table]
    assert choose_crossover(scaled) == chosen


def test_batches_are_measured_up_to_twice_the_heads() -> None:
    assert measured_sizes(4) == (1, 2, 4, 8)
    assert measured_sizes(6) == (1, 2, 4, 8)
    assert measured_sizes(128)[-1] == 256
    assert hopeless(Timing(8, 1.0, 2.1))
    assert not hopeless(Timing(8, 1.0, 1.9))
