"""Copies ahead of a KV cache in RAM: which caches come next, and what of them has to be copied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.schedule.cache_order import CacheOrder, CachePart, stale_bytes

ROW = 4


def part(layer: int, kind: int = 0, n_rows: int = 8) -> CachePart:
    return CachePart(10 * layer + kind, layer, 0, ROW * n_rows)


def seen(order: CacheOrder, its: CachePart) -> tuple[bool, list[CachePart]]:
    return order.begins(its), list(order.after())


@given(st.integers(1, 6), st.integers(1, 2), st.integers(1, 4))
def test_each_pass_foresees_the_layers_after_each(
    n_layers: int, n_kinds: int, n_passes: int
) -> None:
    """`n_kinds`: keys alone, or keys and values."""
    order = CacheOrder()
    layers = [[part(layer, kind) for kind in range(n_kinds)] for layer in range(n_layers)]
    for nth in range(n_passes if n_layers > 1 else 1):
        for layer, parts in enumerate(layers):
            for i, its in enumerate(parts):
                begins, following = seen(order, its)
                assert begins is (layer == i == 0)
                is_last = i == n_kinds - 1
                known = nth and is_last and layer + 1 < n_layers
                assert following == (layers[layer + 1] if known else [])


def test_one_cache_that_is_read_as_keys_and_as_values_is_two_parts() -> None:
    order, keys, values = CacheOrder(), part(0), part(0, n_rows=7)
    other = part(1)
    for its in (keys, values, other, other):
        seen(order, its)
    assert seen(order, keys) == (True, [])
    assert seen(order, values) == (False, [other, other])


def test_another_order_foresees_nothing() -> None:
    order = CacheOrder()
    for layer in (0, 1, 2):
        seen(order, part(layer))
    assert seen(order, part(0)) == (True, [part(1)])
    assert seen(order, part(2)) == (False, [])  # a layer was left out


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 8))
def test_what_was_written_or_is_new_is_copied_again(
    n_staged: int, n_wanted: int, first: int, n_written: int
) -> None:
    rows = range(first, first + n_written)
    found = stale_bytes(part(0, n_rows=n_staged), part(0, n_rows=n_wanted), rows, ROW)
    copied = [byte for its in found for byte in its]
    assert len(copied) == len(set(copied))
    stale = [row for row in range(n_wanted) if row >= n_staged or row in rows]
    assert sorted(copied) == [ROW * row + i for row in stale for i in range(ROW)]
