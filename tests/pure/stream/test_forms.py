"""Host graphs are shared by layers of one form. Layers that compute otherwise have another form."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from offload.ggml.graph import Graph, Product
from offload.ggml.hostbuffer import CpuBufferType
from offload.ggml.tensor import Buffer, Tensor, new_tensor
from offload.stream.forms import ExpertForm, find_form

N_IN, N_FF, N_EXPERTS, N_USED, N_TOKENS = 64, 32, 4, 2, 3
MakeForm = Callable[..., ExpertForm]


@pytest.fixture
def make_form() -> Iterator[MakeForm]:
    buffer = Buffer(CpuBufferType().address, 1 << 20, "a layer")

    def made(*, is_swapped: bool = False) -> ExpertForm:
        n_at = 0

        def place(n_bytes: int) -> tuple[Buffer, int]:
            nonlocal n_at
            n_at += 4096 * (1 + n_bytes // 4096)
            return buffer, n_at

        def product(weight: Tensor, rows: Tensor) -> Tensor:
            n = weight.shape[1]
            shape = n, N_USED, N_TOKENS, 1
            at = place(4 * n * N_USED * N_TOKENS)
            return new_tensor("f32", shape, at, "MUL_MAT_ID", [weight, rows, ids])

        def weight(n_in: int, n_out: int, name: str) -> Tensor:
            shape = n_in, n_out, N_EXPERTS, 1
            return new_tensor("f32", shape, place(4 * n_in * n_out * N_EXPERTS), name=name)

        ids = new_tensor("i32", (N_USED, N_TOKENS, 1, 1), place(64))
        rows = new_tensor("f32", (N_IN, 1, N_TOKENS, 1), place(4 * N_IN * N_TOKENS))
        firsts = [weight(N_IN, N_FF, "gate"), weight(N_IN, N_FF, "up")]
        products = [product(one, rows) for one in firsts]
        values = products[::-1] if is_swapped else products
        shape = N_FF, N_USED, N_TOKENS, 1
        acted = new_tensor("f32", shape, place(4 * N_FF * N_USED * N_TOKENS), "GLU", values)
        down = weight(N_FF, N_IN, "down")
        result = product(down, acted)
        nodes = [*products, acted, result]
        of_layer = [
            Product(nodes.index(node), node, weight_of, ids)
            for node, weight_of in [*zip(products, firsts, strict=True), (result, down)]
        ]
        return find_form(Graph.of(nodes), of_layer)

    yield made
    buffer.close()


def test_layers_with_other_weights_have_one_form(make_form: MakeForm) -> None:
    assert make_form().key == make_form().key


def test_swapped_sources_are_another_form(make_form: MakeForm) -> None:
    """A worker's client could otherwise choose what is computed for all later clients."""
    assert make_form().key != make_form(is_swapped=True).key
