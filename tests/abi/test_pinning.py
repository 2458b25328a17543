"""Memory is pinned through a (fake) GPU registry, and files are mapped without being read."""

from __future__ import annotations

import ctypes as C
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numa.memory import PlacedMemory
from offload.errors import BadModel
from offload.ggml import memory as host_memory
from offload.ggml.backend import Device
from offload.ggml.hostbuffer import mapping_without_reading
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange, Pinner, pieces_of, plain_register
from offload.model_file import read_facts
from offload.store.store import Store, StoreOptions

CPU = abi.GGML_BACKEND_DEVICE_TYPE_CPU


class FakeGpu:
    """A device whose registry pins what it is asked to, or refuses."""

    def __init__(self, *, accepts: bool, most_bytes: int = 1 << 62) -> None:
        self.pinned: dict[int, int] = {}
        self.n_asked = 0
        self._name = C.create_string_buffer(b"FAKE")
        self._keep: list[Any] = []

        def register(address: int, size: int) -> bool:
            self.n_asked += 1
            taken = accepts and sum(self.pinned.values()) + size <= most_bytes
            if taken:
                self.pinned[address] = size
            return taken

        def unregister(address: int) -> None:
            self.pinned.pop(address, None)

        entries = {
            b"ggml_backend_register_host_buffer": self._thunk(
                C.CFUNCTYPE(C.c_bool, C.c_void_p, C.c_size_t), register
            ),
            b"ggml_backend_unregister_host_buffer": self._thunk(
                C.CFUNCTYPE(None, C.c_void_p),
                lambda address: self.pinned.pop(address, None) and None,
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
    pinner = Pinner(gpu)
    result = pinner.pin(HostRange(0x10000, 4096))
    assert (result.ok, result.reason) == (True, "pinned by the FAKE backend")
    assert gpu.pinned == {0x10000: 4096}
    pinner.unpin(HostRange(0x10000, 4096))
    pinner.unpin(HostRange(0x10000, 4096))
    assert gpu.pinned == {}


def test_a_refusal_names_the_memory_lock_limit_where_that_may_be_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(accepts=False)
    pinner = Pinner(gpu)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    result = pinner.pin(HostRange(0x10000, 3 << 30))
    assert not result.ok
    assert "3.0 GiB" in result.reason
    assert "memory-lock limit is 8 MiB" in result.reason
    assert "ulimit -l" in result.reason
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert "GGML_CUDA_REGISTER_HOST" in pinner.pin(HostRange(0x10000, 3 << 30)).reason


def test_memory_is_pinned_in_pieces_and_copies_are_cut_at_their_borders() -> None:
    gpu = FakeGpu(accepts=True)
    pinner = Pinner(gpu, most_at_once_bytes=4096)
    memory = HostRange(0x10000, 3 * 4096 - 100)
    result = pinner.pin(memory)
    assert (result.ok, result.reason) == (True, "pinned by the FAKE backend in 3 pieces")
    assert gpu.pinned == {0x10000: 4096, 0x11000: 4096, 0x12000: 4096 - 100}
    assert pieces_of(0x10000, 4096) == [(0, 4096)], "up to a border"
    assert pieces_of(0x11000, 96) == [(0, 96)], "from a border"
    assert pieces_of(0x10FFF, 2) == [(0, 1), (1, 1)]
    assert pieces_of(0x10010, 0x2000) == [(0, 0xFF0), (0xFF0, 0x1000), (0x1FF0, 0x10)]
    assert pieces_of(0x20000, 1 << 40) == [(0, 1 << 40)], "memory of others"
    pinner.unpin(memory)
    assert gpu.pinned == {}
    assert pieces_of(0x10010, 0x2000) == [(0, 0x2000)]


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 12))
def test_the_parts_of_a_copy_are_the_copy_and_each_lies_in_one_piece(
    start: int, size: int, step: int
) -> None:
    gpu = FakeGpu(accepts=True)
    pinner = Pinner(gpu, most_at_once_bytes=step)
    memory = HostRange(0x10000, 80)
    pinner.pin(memory)
    parts = pieces_of(memory.address + start, size)
    assert [i for at, n in parts for i in range(at, at + n)] == list(range(size))
    for at, n in parts:
        first, last = start + at, start + at + n - 1
        assert first // step == last // step
    pinner.unpin(memory)


def test_a_piece_that_is_refused_gives_the_others_back() -> None:
    gpu = FakeGpu(accepts=True, most_bytes=2 * 4096)
    pinner = Pinner(gpu, most_at_once_bytes=4096)
    assert not pinner.pin(HostRange(0x10000, 3 * 4096)).ok
    assert gpu.n_asked == 3
    assert gpu.pinned == {}
    assert pieces_of(0x10000, 3 * 4096) == [(0, 3 * 4096)]


def test_progress_is_told_before_each_piece_and_ctrl_c_there_unpins_the_others() -> None:
    gpu = FakeGpu(accepts=True)
    pinner = Pinner(gpu, most_at_once_bytes=4096)
    memory, told = HostRange(0x10000, 4 * 4096), list[float]()
    assert pinner.pin(memory, told.append).ok
    assert told == [0, 0.25, 0.5, 0.75]
    pinner.unpin(memory)

    def interrupt(done: float) -> None:
        if done == 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pinner.pin(memory, interrupt)
    assert gpu.pinned == {}
    assert pieces_of(0x10000, 3 * 4096) == [(0, 3 * 4096)]


def test_children_do_not_get_pinned_memory() -> None:
    gpu = FakeGpu(accepts=True)
    pinner = Pinner(gpu)
    with PlacedMemory(4 << 20) as placed:
        memory = HostRange.of_placed(placed)
        memory.array()[:] = 1
        pinner.pin(memory)
        assert "dc" in flags_of(placed), "not copied on fork"
        pinner.unpin(memory)
        assert "dc" not in flags_of(placed)


def flags_of(memory: PlacedMemory) -> set[str]:
    """The kernel's flags of the mapping, as /proc/self/smaps has them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            start, stop = (int(part, 16) for part in head.split("-"))
            inside = start <= memory.address < stop
        elif inside and head == "VmFlags:":
            return set(rest)
    raise AssertionError("the mapping is gone")


def test_the_plain_registration_needs_a_cuda_runtime(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f10 r-xp 00000000 00:00 0 /lib/libc.so.6\n")
    assert plain_register(maps) is None
    assert plain_register(tmp_path / "none") is None


def test_a_device_without_read_only_pages_pins_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(accepts=False)
    plain: list[tuple[int, int]] = []
    monkeypatch.setattr(
        host_memory, "plain_register", lambda: lambda a, n: plain.append((a, n)) is None
    )
    assert Pinner(gpu).pin(HostRange(0x10000, 4096)).ok
    assert gpu.n_asked == 1, "read-only pages first"
    assert plain == [(0x10000, 4096)]


def test_a_backend_that_cannot_pin_says_so() -> None:
    assert not Pinner(Device(cpu_device())).can_pin
    result = Pinner(Device(cpu_device())).pin(HostRange(0x10000, 4096))
    assert (result.ok, result.reason) == (False, "the CPU backend cannot pin memory of ours")


def cpu_registry() -> Any:
    return abi.ggml_backend_reg.from_address(library().ggml_backend_dev_backend_reg(cpu_device()))


def is_numa() -> bool:
    """The answer that libllama would get from ggml_backend_cpu_is_numa."""
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
    with mapping_without_reading(pending) as asked:
        assert is_numa()
        assert lib.ggml_backend_reg_get_proc_address(registry, other) == before
        assert lib.ggml_backend_reg_get_proc_address(registry, b"no such function") is None
    assert asked.times == 1
    assert not is_numa()
    pending.raise_first()


def test_the_registry_is_restored_after_an_exception() -> None:
    before = cpu_registry().iface.get_proc_address

    def fail_inside() -> None:
        with mapping_without_reading(Pending()):
            assert cpu_registry().iface.get_proc_address != before
            raise BadModel("inside")

    with pytest.raises(BadModel, match="inside"):
        fail_inside()
    assert cpu_registry().iface.get_proc_address == before


def test_the_store_pins_its_memory_after_the_pages_are_huge_and_unpins_it(tiny_moe: Path) -> None:
    gpu = FakeGpu(accepts=True)
    facts = read_facts(tiny_moe)
    store = Store(facts, facts.expert_weights, StoreOptions(pin_for=gpu))
    with store.loading(Pending()):
        for entry in facts.expert_weights:
            store.place(entry.name, entry.size_bytes)
    told: list[tuple[str, float]] = []
    report = store.finish(lambda step, done: told.append((step, done)))
    steps = list(dict.fromkeys(step for step, _ in told))
    assert steps == ["reading weights", "making huge pages", "pinning memory"]
    assert all(0 <= done <= 1 for _, done in told)
    assert report.not_pinned_reason == ""
    assert store.memory is not None
    assert gpu.pinned == {store.memory.address: store.memory.mapped_bytes}
    assert report.huge.reason != "being made"
    store.close()
    assert gpu.pinned == {}
