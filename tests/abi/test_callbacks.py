"""If a Python vtable entry raises, C gets the declared failure and Python the exception itself."""

from __future__ import annotations

import ctypes as C
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from offload.ggml.backend import Device
from offload.ggml.graph import Product
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library, op_number
from offload.ggml.memory import HostRange
from offload.ggml.pydevice import FAILED, PyDevice

_CPU = 0


class Boom(Exception):
    pass


def explode(*_: Any) -> Any:
    raise Boom("from inside a callback")


class ExplodingDevice(PyDevice):
    takes = explode
    compute = explode
    memory_bytes = explode
    opened = explode
    closed = explode


class PlainMemory:
    def __init__(self) -> None:
        self.blocks: list[Any] = []

    def allocate(self, size_bytes: int) -> HostRange:
        self.blocks.append(C.create_string_buffer(size_bytes + 4096))
        return HostRange((C.addressof(self.blocks[-1]) + 4095) & ~4095, size_bytes)

    def free(self, memory: HostRange) -> None:
        pass


def product_with(host: HostBufferType, n_tokens: int = 3, view: bool = False) -> tuple[Any, Any]:
    """A product of a weight in the memory of `host`, and what it refers to."""
    buffer = library().ggml_backend_buft_alloc_buffer(host.address, 1 << 14)
    weight, rows, node = (abi.ggml_tensor() for _ in range(3))
    for tensor, shape in ((weight, (32, 8, 1, 1)), (rows, (32, n_tokens, 1, 1)),
                          (node, (8, n_tokens, 1, 1))):  # fmt: skip
        tensor.ne[:], tensor.nb[:] = shape, (4, 128, 1024, 1024)
    weight.buffer, node.op = buffer, op_number("MUL_MAT")
    weight.view_src = C.addressof(rows) if view else None
    node.src[0], node.src[1] = C.addressof(weight), C.addressof(rows)
    return node, (weight, rows)


class ExplodingMemory:
    allocate = explode
    free = explode


def inner_device() -> Device:
    return Device(library().ggml_backend_dev_by_type(_CPU))


@pytest.fixture
def pending() -> Pending:
    return Pending()


@pytest.fixture
def device(pending: Pending) -> Iterator[ExplodingDevice]:
    host = HostBufferType("TEST_HOST", PlainMemory(), pending)
    made = ExplodingDevice(inner_device(), "TEST0", pending, host)
    yield made
    for stream in made.streams.values():
        stream.inner.close()


def call(owner: Any, entry: str, *arguments: Any) -> Any:
    """Call a vtable entry the way C does: through its address and declared type."""
    struct = getattr(owner, "iface")  # noqa: B009 - a ctypes field, not an attribute of a class
    return abi.PROTOTYPES[entry](getattr(struct, entry.split(".")[1]))(*arguments)


def assert_kept(pending: Pending) -> None:
    with pytest.raises(Boom, match="from inside a callback") as caught:
        pending.raise_first()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "explode" in frames, "the traceback must lead to the place that raised"
    assert pending.first is None


@pytest.mark.parametrize(
    ("entry", "declared"),
    [("supports_op", False), ("init_backend", None)],
)
def test_a_device_entry_that_raises_gives_c_the_declared_failure(
    device: ExplodingDevice, pending: Pending, entry: str, declared: Any
) -> None:
    assert device.host is not None
    node, kept = product_with(device.host)
    argument = None if entry == "init_backend" else C.addressof(node)
    result = call(device.struct, f"ggml_backend_device_i.{entry}", device.address, argument)
    assert result == declared
    assert_kept(pending)
    del kept


def test_get_memory_that_raises_keeps_the_exception(
    device: ExplodingDevice, pending: Pending
) -> None:
    free, total = C.c_size_t(), C.c_size_t()
    call(
        device.struct,
        "ggml_backend_device_i.get_memory",
        device.address,
        C.addressof(free),
        C.addressof(total),
    )
    assert_kept(pending)


def test_get_props_that_raises_keeps_the_exception(
    device: ExplodingDevice, pending: Pending
) -> None:
    props = abi.ggml_backend_dev_props()
    call(device.struct, "ggml_backend_device_i.get_props", device.address, C.addressof(props))
    assert_kept(pending)


def test_a_backend_whose_computation_raises_reports_failure(pending: Pending) -> None:
    class FailingCompute(PyDevice):
        compute = explode
        closed = explode

    device = FailingCompute(inner_device(), "TEST0", pending)
    address = call(device.struct, "ggml_backend_device_i.init_backend", device.address, None)
    stream = device.streams[address]
    graph = abi.ggml_cgraph()
    result = call(stream.struct, "ggml_backend_i.graph_compute", address, C.addressof(graph))
    assert result == FAILED
    assert_kept(pending)
    call(stream.struct, "ggml_backend_i.free", address)
    assert_kept(pending)
    assert device.streams == {}, "a failing hook must not leak the backend"


def test_a_buffer_type_whose_memory_raises_returns_no_buffer(pending: Pending) -> None:
    host = HostBufferType("TEST_HOST", ExplodingMemory(), pending)
    buffer = library().ggml_backend_buft_alloc_buffer(host.address, 1 << 16)
    assert buffer is None
    assert_kept(pending)


def test_a_free_that_raises_is_kept(pending: Pending) -> None:
    class HalfBrokenMemory:
        free = explode

        def __init__(self) -> None:
            self.block = C.create_string_buffer(1 << 17)

        def allocate(self, size_bytes: int) -> HostRange:
            return HostRange((C.addressof(self.block) + 4095) & ~4095, size_bytes)

    host = HostBufferType("TEST_HOST", HalfBrokenMemory(), pending)
    buffer = library().ggml_backend_buft_alloc_buffer(host.address, 1 << 14)
    assert buffer
    library().ggml_backend_buffer_free(buffer)
    assert_kept(pending)


def test_the_device_replaces_these_entries_only(pending: Pending) -> None:
    device = PyDevice(inner_device(), "TEST0", pending)
    inner = abi.ggml_backend_device.from_address(device.inner.address)
    replaced = {
        name
        for name, _ in abi.ggml_backend_device_i._fields_
        if getattr(device.struct.iface, name) != getattr(inner.iface, name)
    }
    assert replaced == {
        "get_name", "get_type", "get_props", "get_memory",
        "supports_op", "supports_buft", "offload_op", "init_backend",
    }  # fmt: skip


def supports(device: PyDevice, node: Any) -> bool:
    entry = "ggml_backend_device_i.supports_op"
    return bool(call(device.struct, entry, device.address, C.addressof(node)))


class Asked(PyDevice):
    answer = True

    def takes(self, product: Product) -> bool:
        return self.answer


def test_only_products_with_weights_in_our_memory_ask_python(pending: Pending) -> None:
    host = HostBufferType("TEST_HOST", PlainMemory(), pending)
    device = Asked(inner_device(), "TEST0", pending, host)
    node, (weight, rows) = product_with(host)
    assert supports(device, node)
    assert device.n_asked == 1
    weight.buffer = None
    supports(device, node)
    node.op = op_number("ADD")
    node.src[1] = None
    weight.buffer = C.addressof(rows)  # a buffer whose type is not ours
    supports(device, node)
    assert device.n_asked == 1
    entry = "ggml_backend_device_i.supports_buft"
    cpu = library().ggml_backend_cpu_buffer_type()
    for face, expected in ((host.address, True), (host.dense.address, True), (cpu, True)):
        assert call(device.struct, entry, device.address, face) == expected
    device.keep_apart()
    assert call(device.struct, entry, device.address, host.dense.address)
    assert not call(device.struct, entry, device.address, cpu)


def test_answers_are_remembered_for_equal_products_only(pending: Pending) -> None:
    host = HostBufferType("TEST_HOST", PlainMemory(), pending)
    device = Asked(inner_device(), "TEST0", pending, host)
    node, (_, rows) = product_with(host)
    for _ in range(2):
        supports(device, node)
    assert device.n_asked == 2, "nothing is remembered without remember_answers"
    device.remember_answers(on=True)
    for _ in range(3):
        assert supports(device, node)
    assert device.n_asked == 3
    device.answer = False
    others = [product_with(host, 4), product_with(host, 5), product_with(host, view=True)]
    assert not any(supports(device, other) for other, _ in others for _ in range(2))
    assert device.n_asked == 3 + 2 + 2, "a view's address may become another tensor's"
    rows.nb[1] += 4
    assert not supports(device, node)
    rows.nb[1] -= 4
    assert supports(device, node)
    device.forget_answers()
    assert not supports(device, node)


def test_an_answer_that_failed_is_not_remembered(pending: Pending) -> None:
    host = HostBufferType("TEST_HOST", PlainMemory(), pending)
    device = ExplodingDevice(inner_device(), "TEST0", pending, host)
    device.remember_answers(on=True)
    node, kept = product_with(host)
    for _ in range(2):
        assert not supports(device, node)
        assert_kept(pending)
    del kept


def test_more_products_than_answers_are_kept_are_all_answered(pending: Pending) -> None:
    class Even(PyDevice):
        def takes(self, product: Product) -> bool:
            return product.n_tokens % 2 == 0

    host = HostBufferType("TEST_HOST", PlainMemory(), pending)
    device = Even(inner_device(), "TEST0", pending, host)
    device.remember_answers(on=True)
    node, (_, rows) = product_with(host)
    for _ in range(2):
        for n_tokens in range(9000):
            node.ne[1] = rows.ne[1] = n_tokens
            assert supports(device, node) == (n_tokens % 2 == 0)


def test_the_first_of_several_exceptions_is_the_one_raised(pending: Pending) -> None:
    prototype = C.CFUNCTYPE(C.c_int)
    errors = iter([ValueError("first"), KeyError("second")])

    def fail() -> int:
        raise next(errors)

    thunk, _ = guard(prototype, pending, -7, fail)
    assert (thunk(), thunk()) == (-7, -7)
    with pytest.raises(ValueError, match="first"):
        pending.raise_first()
    pending.raise_first()  # nothing left


def test_a_keyboard_interrupt_inside_a_callback_is_not_swallowed(pending: Pending) -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    thunk, _ = guard(C.CFUNCTYPE(C.c_bool), pending, False, interrupt)
    assert thunk() is False
    with pytest.raises(KeyboardInterrupt):
        pending.raise_first()
