"""Pinning through a GPU registry (a made-up one), and mapping without populating."""

from __future__ import annotations

import ctypes as C
import resource
from pathlib import Path
from typing import Any

import pytest

from offload.errors import BadModel
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library
from offload.ggml.library.unpopulated import without_populating
from offload.ggml.memory import HostRange
from offload.ggml.pinning import Pinner
from offload.model_file import read_facts
from offload.store.store import Store, StoreOptions

CPU = abi.GGML_BACKEND_DEVICE_TYPE_CPU


class FakeGpu:
    """A device whose registry pins what it is asked to, or refuses."""

    def __init__(self, *, accepts: bool) -> None:
        self.pinned: dict[int, int] = {}
        self._name = C.create_string_buffer(b"FAKE")
        self._keep: list[Any] = []

        def register(address: int, size: int) -> bool:
            if accepts:
                self.pinned[address] = size
            return accepts

        entries = {
            b"ggml_backend_register_host_buffer": self._thunk(
                C.CFUNCTYPE(C.c_bool, C.c_void_p, C.c_size_t), register
            ),
            b"ggml_backend_unregister_host_buffer": self._thunk(
                C.CFUNCTYPE(None, C.c_void_p), lambda address: self.pinned.pop(address) and None
            ),
        }
        self._registry = abi.ggml_backend_reg()
        name = C.addressof(self._name)
        self._registry.iface.get_name = self._thunk(
            abi.PROTOTYPES["ggml_backend_reg_i.get_name"], lambda _: name
        )
        self._registry.iface.get_proc_address = self._thunk(
            abi.PROTOTYPES["ggml_backend_reg_i.get_proc_address"],
            lambda _, wanted: entries.get(wanted),
        )
        self._device = abi.ggml_backend_device()
        self._device.reg = C.addressof(self._registry)
        self.address = C.addressof(self._device)

    def _thunk(self, prototype: Any, function: Any) -> int:
        thunk = prototype(function)
        self._keep.append(thunk)
        return C.cast(thunk, C.c_void_p).value or 0


def cpu_device() -> int:
    address: int = library().ggml_backend_dev_by_type(CPU)
    return address


def test_memory_is_pinned_through_the_registry_and_given_back_once() -> None:
    gpu = FakeGpu(accepts=True)
    pinner = Pinner(gpu.address)
    result = pinner.pin(HostRange(0x10000, 4096))
    assert (result.ok, result.reason) == (True, "pinned by the FAKE backend")
    assert gpu.pinned == {0x10000: 4096}
    pinner.unpin(HostRange(0x10000, 4096))
    pinner.unpin(HostRange(0x10000, 4096))
    assert gpu.pinned == {}


def test_a_refusal_names_the_memory_lock_limit_where_that_may_be_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinner = Pinner(FakeGpu(accepts=False).address)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    result = pinner.pin(HostRange(0x10000, 3 << 30))
    assert not result.ok
    assert "3.0 GiB" in result.reason
    assert "memory-lock limit is 8 MiB" in result.reason
    assert "ulimit -l" in result.reason
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert "GGML_CUDA_REGISTER_HOST" in pinner.pin(HostRange(0x10000, 3 << 30)).reason


def test_a_backend_that_cannot_pin_says_so() -> None:
    assert not Pinner(cpu_device()).can_pin
    result = Pinner(cpu_device()).pin(HostRange(0x10000, 4096))
    assert (result.ok, result.reason) == (False, "the CPU backend cannot pin memory of ours")


def cpu_registry() -> Any:
    return abi.ggml_backend_reg.from_address(library().ggml_backend_dev_backend_reg(cpu_device()))


def is_numa() -> bool:
    """What libllama would be told."""
    lib, device = library(), cpu_device()
    registry = lib.ggml_backend_dev_backend_reg(device)
    address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_cpu_is_numa")
    return bool(C.CFUNCTYPE(C.c_bool)(address)())


def test_inside_libllama_is_told_not_to_populate_and_everything_else_is_as_before() -> None:
    lib = library()
    registry = lib.ggml_backend_dev_backend_reg(cpu_device())
    other = b"ggml_backend_set_n_threads"
    before = lib.ggml_backend_reg_get_proc_address(registry, other)
    pending = Pending()
    assert not is_numa()
    with without_populating(pending) as asked:
        assert is_numa()
        assert lib.ggml_backend_reg_get_proc_address(registry, other) == before
        assert lib.ggml_backend_reg_get_proc_address(registry, b"no such function") is None
    assert asked.times == 1
    assert not is_numa()
    pending.raise_first()


def test_the_registry_is_restored_after_an_exception() -> None:
    before = cpu_registry().iface.get_proc_address

    def fail_inside() -> None:
        with without_populating(Pending()):
            assert cpu_registry().iface.get_proc_address != before
            raise BadModel("inside")

    with pytest.raises(BadModel, match="inside"):
        fail_inside()
    assert cpu_registry().iface.get_proc_address == before


def test_the_store_pins_its_memory_after_the_pages_are_huge_and_unpins_it(tiny_moe: Path) -> None:
    gpu = FakeGpu(accepts=True)
    facts = read_facts(tiny_moe)
    store = Store(facts, facts.expert_weights, StoreOptions(pin_for=gpu.address))
    with store.loading(Pending()):
        for entry in facts.expert_weights:
            store.place(entry.name, entry.size_bytes)
    report = store.finish()
    assert report.why_not_pinned == ""
    assert store.memory is not None
    assert gpu.pinned == {store.memory.address: store.memory.mapped_bytes}
    assert report.huge.why_not != "being made"
    store.close()
    assert gpu.pinned == {}
