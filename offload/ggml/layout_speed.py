"""Times products on the CPU with a weight in the file's layout, and with the repacked weight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

import numpy as np

from offload.ggml.backend import Stream
from offload.ggml.extra_buffers import extra_buffer_types
from offload.ggml.graph import Graph
from offload.ggml.library.lib import library
from offload.ggml.tensor import Buffer, Dims, Tensor, new_tensor
from offload.ggml.threads import check, cpu_device
from offload.plan.repacking import LayoutTimes, WeightKind

_WHAT = "timing a product"
# In q4_K both layouts together have 75 and 38 MB, so that few reads are served by caches.
_EXPERTS: Dims = (2048, 1024, 32, 1)
_DENSE: Dims = (4096, 8192, 1, 1)
_N_USED = 8  # experts of a token
_N_PROMPT = 128  # tokens of a prompt, so 32 for each expert, as in ubatches of 512 over 128 experts
_LEAST_S, _LEAST_TURNS = 0.25, 4  # timings of each number of tokens; the least time counts
_EXTRA = 2  # most bytes of a repacked weight ÷ its bytes, because AMX pads

_TensorPlace = tuple[Buffer, int] | None


def layout_times(kind: WeightKind) -> LayoutTimes | None:
    """Time both layouts of one weight in turn on one thread, which takes about a second.

    Several threads wait for each other. So while other programs run, a product of one token takes
    as long as the kernel's time slice, in either layout.

    Returns None if ggml cannot repack weights of this kind. Raises DoesNotFit or DeviceFailed.
    """
    extra = _repacking_type(kind)
    if extra is None:
        return None
    with ExitStack() as stack:
        stream = stack.enter_context(closing(cpu_device().open()))
        library().ggml_backend_cpu_set_n_threads(stream.address, 1)
        products = [_TimedProduct(kind, it, stack) for it in (cpu_device().buffer_type, extra)]
        plain_one_s, repacked_one_s = _least_s(products, stream, 1)
        prompts_s = _least_s(products, stream, _N_PROMPT)
    return LayoutTimes(plain_one_s, repacked_one_s, *(s / _N_PROMPT for s in prompts_s))


def _repacking_type(kind: WeightKind) -> int | None:
    """Return the address of the buffer type that libllama would choose, or None if none fits."""
    for address in extra_buffer_types().values():
        with closing(Buffer(address, 1, _WHAT)) as buffer:
            weight = new_tensor(kind.type, _shape(kind), None)
            weight.lie_in(buffer.address)
            if cpu_device().supports(_node(kind, weight, 1, (None, None, None))):
                return address
    return None


def _least_s(products: Sequence[_TimedProduct], stream: Stream, n_tokens: int) -> list[float]:
    """Return the least seconds of each product, timed in turn."""
    turns: list[list[float]] = []
    start_s = time.perf_counter()
    while len(turns) < _LEAST_TURNS or time.perf_counter() - start_s < _LEAST_S:
        turns.append([product.seconds(n_tokens, stream) for product in products])
    return [min(times) for times in zip(*turns, strict=True)]


class _TimedProduct:
    """A weight in memory of one buffer type, with random tokens that use random experts."""

    def __init__(self, kind: WeightKind, buffer_type: int, stack: ExitStack) -> None:
        self._random = np.random.default_rng(0)
        unplaced = new_tensor(kind.type, _shape(kind), None)
        n_bytes = unplaced.size_bytes
        memory = stack.enter_context(closing(Buffer(buffer_type, _EXTRA * n_bytes, _WHAT)))
        weight = new_tensor(kind.type, _shape(kind), (memory, 0))
        check(library().ggml_backend_buffer_init_tensor(memory.address, weight.address), _WHAT)
        _write(weight, np.zeros(n_bytes, np.uint8))  # ggml repacks now; values do not affect times
        largest = _node(kind, weight, _N_PROMPT, (None, None, None))
        at: list[_TensorPlace] = []
        for tensor in (*_inputs(largest), largest):
            buffer = cpu_device().allocate(tensor.size_bytes, _WHAT)
            at.append((stack.enter_context(closing(buffer)), 0))
        places = (at[0], at[1] if kind.experts else None, at[-1])
        self._nodes = {n: _node(kind, weight, n, places) for n in (1, _N_PROMPT)}
        tokens = _inputs(self._nodes[_N_PROMPT])[0]
        _write(tokens, self._random.standard_normal(tokens.size_bytes // 4, np.float32))

    def seconds(self, n_tokens: int, stream: Stream) -> float:
        """Return the seconds of the product with `n_tokens` tokens."""
        node = self._nodes[n_tokens]
        for ids in _inputs(node)[1:]:
            numbers = np.tile(np.arange(_EXPERTS[2], dtype=np.int32), (n_tokens, 1))
            _write(ids, np.ascontiguousarray(self._random.permuted(numbers, axis=1)[:, :_N_USED]))
        start_s = time.perf_counter()
        check(stream.compute(Graph.of([node])), _WHAT)
        stream.synchronize()
        return time.perf_counter() - start_s


def _shape(kind: WeightKind) -> Dims:
    return _EXPERTS if kind.experts else _DENSE


def _node(
    kind: WeightKind,
    weight: Tensor,
    n_tokens: int,
    at: tuple[_TensorPlace, _TensorPlace, _TensorPlace],
) -> Tensor:
    """Return a product whose tokens, ids of experts and results lie in these places."""
    n_in, n_out, _, _ = weight.shape
    if not kind.experts:
        tokens = new_tensor("f32", (n_in, n_tokens, 1, 1), at[0])
        return new_tensor("f32", (n_out, n_tokens, 1, 1), at[2], "MUL_MAT", [weight, tokens])
    tokens = new_tensor("f32", (n_in, 1, n_tokens, 1), at[0])
    ids = new_tensor("i32", (_N_USED, n_tokens, 1, 1), at[1])
    shape = (n_out, _N_USED, n_tokens, 1)
    return new_tensor("f32", shape, at[2], "MUL_MAT_ID", [weight, tokens, ids])


def _inputs(node: Tensor) -> list[Tensor]:
    """Return the tokens of a product, and the ids of experts if it has them."""
    return [source for i in (1, 2) if (source := node.source(i)) is not None]


def _write(tensor: Tensor, values: np.ndarray) -> None:
    library().ggml_backend_tensor_set(tensor.address, values.ctypes.data, 0, values.nbytes)
