"""A layer whose merged gate and up have a factor for each expert: as `build_moe_ffn` makes it.

No file can have one. llama.cpp loads such a factor, `ffn_up_exps.scale`, only beside an up of its
own (`ffn_up_exps_s` in llama-model.cpp), and none of the nine architectures that may have gate and
up merged has both. Its graph would know it, and so do we: here the graph is made by ggml's own
functions, in llama.cpp's order.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from offload.ggml.graph import Graph, as_product
from offload.ggml.library import abi
from offload.ggml.library.lib import op_number
from offload.ggml.tensor import Tensor, op_at, type_number
from offload.ggml.threads import cpu_device
from offload.split.cpu_side import ExpertForm, HostGraph, find_form, layer_weights

N_EMBD, N_FF, N_EXPERTS, N_USED, N_TOKENS = 64, 32, 8, 3, 5

_P, _I64, _SIZE, _INT = C.c_void_p, C.c_int64, C.c_size_t, C.c_int
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_init": (_P, abi.ggml_init_params),
    "ggml_free": (None, _P),
    "ggml_new_tensor": (_P, _P, _INT, _INT, C.POINTER(_I64)),
    "ggml_mul_mat_id": (_P, _P, _P, _P, _P),
    "ggml_reshape_3d": (_P, _P, _P, _I64, _I64, _I64),
    "ggml_repeat_4d": (_P, _P, _P, _I64, _I64, _I64, _I64),
    "ggml_get_rows": (_P, _P, _P, _P),
    "ggml_mul": (_P, _P, _P, _P),
    "ggml_add_id": (_P, _P, _P, _P, _P),
    "ggml_view_3d": (_P, _P, _P, _I64, _I64, _I64, _SIZE, _SIZE, _SIZE),
    "ggml_swiglu_split": (_P, _P, _P, _P),
    "ggml_new_graph": (_P, _P),
    "ggml_build_forward_expand": (None, _P, _P),
    "ggml_backend_dev_buffer_type": (_P, _P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
    "ggml_backend_buffer_free": (None, _P),
    "ggml_backend_tensor_set": (None, _P, _P, _SIZE, _SIZE),
    "ggml_backend_tensor_get": (None, _P, _P, _SIZE, _SIZE),
}


def call(name: str, *arguments: Any) -> Any:
    """A function of ggml's, with a prototype of our own: others share the handle's."""
    result, *types = _FUNCTIONS[name]
    return C.CFUNCTYPE(result, *types)((name, llama_cpp.llama_cpp._lib))(*arguments)


class MergedLayer:
    """A layer's experts from their rows to the last product and what follows it."""

    def __init__(self, context: int, *, biases: bool) -> None:
        self._context, self._values = context, list[tuple[int, NDArray[Any]]]()
        rng = np.random.default_rng(0)
        gate_up = self._weight(rng.normal(size=(N_EXPERTS, 2 * N_FF, N_EMBD)))
        down_weight = self._weight(rng.normal(size=(N_EXPERTS, N_EMBD, N_FF)))
        self.factors = rng.normal(size=N_EXPERTS).astype(np.float32)
        factors = self._leaf("f32", self.factors)
        down_factors = self._leaf("f32", rng.normal(size=N_EXPERTS).astype(np.float32))
        self.rows = rng.normal(size=(N_TOKENS, 1, N_EMBD)).astype(np.float32)
        chosen = [rng.permutation(N_EXPERTS)[:N_USED] for _ in range(N_TOKENS)]
        self.ids = np.array(chosen, np.int32)
        self._inputs, self._ids = self._leaf("f32", self.rows), self._leaf("i32", self.ids)
        both = self._scaled(self._product(gate_up, self._inputs), factors)
        if biases:
            bias = self._leaf("f32", rng.normal(size=(N_EXPERTS, 2 * N_FF)).astype(np.float32))
            both = call("ggml_add_id", context, both, bias, self._ids)
        gate, up = self._half(both, 0), self._half(both, N_FF)
        joined = call("ggml_swiglu_split", context, gate, up)
        self.down = self._product(down_weight, joined)
        self.graph = Graph(call("ggml_new_graph", context))
        last = self._scaled(self.down, down_factors)
        call("ggml_build_forward_expand", self.graph.address, last)

    def _leaf(self, type_name: str, values: NDArray[Any], shape: tuple[int, ...] = ()) -> int:
        ne = (_I64 * 4)(*reversed(shape or values.shape))
        n_dims, kind = len(shape or values.shape), type_number(type_name)
        made: int = call("ggml_new_tensor", self._context, kind, n_dims, ne)
        self._values.append((made, values))
        return made

    def _weight(self, values: NDArray[Any]) -> int:
        packed = quants.quantize(values.astype(np.float32), GGMLQuantizationType.Q8_0)
        return self._leaf("q8_0", packed, values.shape)

    def _product(self, weight: int, rows: int) -> int:
        return int(call("ggml_mul_mat_id", self._context, weight, rows, self._ids))

    def _scaled(self, rows: int, factors: int) -> int:
        """As `build_lora_mm_id` applies them."""
        found = call("ggml_reshape_3d", self._context, factors, 1, N_EXPERTS, 1)
        found = call("ggml_repeat_4d", self._context, found, 1, N_EXPERTS, N_TOKENS, 1)
        found = call("ggml_get_rows", self._context, found, self._ids)
        return int(call("ggml_mul", self._context, rows, found))

    def _half(self, both: int, first: int) -> int:
        _, row, matrix, _ = Tensor(both).strides
        shape = N_FF, N_USED, N_TOKENS
        return int(call("ggml_view_3d", self._context, both, *shape, row, matrix, 4 * first))

    def fill(self) -> None:
        for tensor, values in self._values:
            call("ggml_backend_tensor_set", tensor, values.ctypes.data, 0, values.nbytes)

    def form(self) -> ExpertForm:
        number = op_number("MUL_MAT_ID")
        at = [i for i, a in enumerate(self.graph.addresses()) if op_at(a) == number]
        products = [as_product(self.graph.addresses()[i], i) for i in at]
        return find_form(self.graph, products)

    def computed(self) -> NDArray[np.float32]:
        """[n_tokens * n_used, n_embd]: rows of the last product, by ggml's graph as it is."""
        with closing(cpu_device().open()) as stream:
            assert stream.compute(self.graph) == 0
        found = np.zeros((N_TOKENS * N_USED, N_EMBD), np.float32)
        call("ggml_backend_tensor_get", self.down, found.ctypes.data, 0, found.nbytes)
        return found


@pytest.fixture(params=[False, True], ids=["factors", "factors and biases"])
def layer(request: pytest.FixtureRequest) -> Iterator[MergedLayer]:
    params = abi.ggml_init_params()
    params.mem_size, params.no_alloc = 1 << 20, True
    context = call("ggml_init", params)
    made = MergedLayer(context, biases=request.param)
    buffer_type = call("ggml_backend_dev_buffer_type", cpu_device().address)
    buffer = call("ggml_backend_alloc_ctx_tensors_from_buft", context, buffer_type)
    made.fill()
    yield made
    call("ggml_backend_buffer_free", buffer)
    call("ggml_free", context)


def test_the_cpu_computes_merged_gate_and_up_with_factors_bit_by_bit(layer: MergedLayer) -> None:
    expected = layer.computed()
    form = layer.form()
    assert len(form.products) == 2
    assert len(form.scales) == 1, "down's is behind its product, for all rows at once"
    weights = layer_weights(form, 1)
    assert np.array_equal(weights.scales[0], layer.factors)
    host = HostGraph(form, 64, cpu_device())
    rng = np.random.default_rng(1)
    with closing(cpu_device().open()) as stream:
        for n in (1, 4, N_TOKENS * N_USED, 7):
            pairs = np.sort(rng.permutation(N_TOKENS * N_USED)[:n]).astype(np.intp)
            host.inputs_of(N_TOKENS).array().view(np.float32)[:] = layer.rows.ravel()
            host.fill(weights, layer.ids, pairs)
            assert host.compute(stream, 1) == 0
            rows = host.results.host_range.part(host.header_bytes, 4 * N_EMBD * n).array()
            assert np.array_equal(rows.view(np.float32).reshape(n, N_EMBD), expected[pairs])
    assert np.abs(expected).min() > 0
    host.close()


def test_another_factor_is_another_row(layer: MergedLayer) -> None:
    """What is compared depends on the factors: the test could not pass without them."""
    before = layer.computed()
    layer.factors *= 2
    layer.fill()
    assert (layer.computed() != before).any(axis=1).all()
