"""The ctypes mirrors of abi.py fit the installed library, and mirrors that do not are refused."""

from __future__ import annotations

import ctypes
import hashlib
import time
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from offload.errors import LibraryMismatch
from offload.ggml.library import abi, selftest
from offload.ggml.library.lib import SIGNATURES, Library, library

STRUCTS = [name for name in vars(abi) if name.startswith("ggml_")]


def check() -> None:
    selftest.check(library())


def swap(monkeypatch: pytest.MonkeyPatch, struct: str, first: str, second: str) -> None:
    """Exchange two members of a mirror, as in an abi.py generated from another version."""
    fields = list(getattr(abi, struct)._fields_)
    i, j = ([f[0] for f in fields].index(name) for name in (first, second))
    fields[i], fields[j] = fields[j], fields[i]
    replace(monkeypatch, struct, fields)


def replace(monkeypatch: pytest.MonkeyPatch, struct: str, fields: list[Any]) -> None:
    """Replace the mirror of `struct`, also in the structures that contain it."""
    original = getattr(abi, struct)
    stale = type(struct, (ctypes.Structure,), {"_fields_": fields})
    size = ctypes.sizeof(original)
    assert ctypes.sizeof(stale) == size, "only a change that keeps the size is quiet"
    monkeypatch.setattr(abi, struct, stale)
    for outer in STRUCTS:
        members = getattr(abi, outer)._fields_
        if any(ctype is original for _, ctype in members):
            members = [(name, stale if t is original else t) for name, t in members]
            replace(monkeypatch, outer, members)


def test_the_installed_library_passes_in_20_milliseconds() -> None:
    check()  # brings the device registry up, once per process
    times_s = []
    for _ in range(5):
        start_s = time.process_time()  # other programs do not lengthen it
        check()
        times_s.append(time.process_time() - start_s)
    assert min(times_s) < 0.020


def test_another_version_is_refused_in_one_sentence_that_names_both() -> None:
    with pytest.raises(LibraryMismatch) as e:
        selftest.check_version("0.3.16")
    assert "0.3.16" in str(e.value)
    assert abi.PACKAGE_VERSION in str(e.value)
    assert "\n" not in str(e.value)


def test_the_mirror_was_made_from_the_headers_that_the_wheel_installed() -> None:
    folder = Path(llama_cpp.__file__).parent.parent / "include"
    if not folder.is_dir():
        pytest.skip("this build of llama-cpp-python installed no headers")
    for name in ("ggml.h", "ggml-backend.h", "llama.h"):
        (key,) = [k for k in abi.SOURCES if k.endswith(f"/include/{name}")]
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == abi.SOURCES[key], name


def test_every_vtable_entry_has_a_prototype_without_a_leaking_result() -> None:
    entries = {
        f"{struct}.{f[0]}"
        for struct in STRUCTS
        if struct.endswith("_i")
        for f in getattr(abi, struct)._fields_
    }
    assert len(entries) == 52
    assert entries <= set(abi.PROTOTYPES)
    for name, prototype in abi.PROTOTYPES.items():
        assert prototype._restype_ is not ctypes.c_char_p, name
        assert ctypes.c_char_p not in prototype._argtypes_[:1], name  # argument 0 is the object


@pytest.mark.parametrize(
    ("struct", "first", "second"),
    [
        ("ggml_tensor", "ne", "nb"),
        ("ggml_tensor", "type", "op"),
        ("ggml_tensor", "view_src", "view_offs"),
        ("ggml_tensor", "buffer", "extra"),
        ("ggml_tensor", "data", "extra"),
        ("ggml_cgraph", "n_nodes", "n_leafs"),
        ("ggml_cgraph", "size", "n_nodes"),
        ("ggml_cgraph", "nodes", "leafs"),
        ("ggml_cgraph", "grads", "use_counts"),
        ("ggml_backend_dev_props", "name", "description"),
        ("ggml_backend_dev_caps", "buffer_from_host_ptr", "events"),
        ("ggml_backend_buffer", "buft", "context"),
        ("ggml_backend_buffer", "context", "size"),
        ("ggml_backend_device", "reg", "context"),
        ("ggml_backend_device_i", "get_name", "get_description"),
        ("ggml_backend_device_i", "get_buffer_type", "get_host_buffer_type"),
        ("ggml_backend_device_i", "supports_op", "offload_op"),
        ("ggml_backend_reg_i", "get_name", "get_device_count"),
        ("ggml_backend_i", "graph_compute", "event_wait"),  # exchanged in 0.3.16's order
        ("ggml_backend", "guid", "context"),
    ],
)
def test_a_mirror_in_another_order_is_refused_by_the_live_library(
    monkeypatch: pytest.MonkeyPatch, struct: str, first: str, second: str
) -> None:
    swap(monkeypatch, struct, first, second)
    with pytest.raises(LibraryMismatch, match="does not fit the installed llama-cpp-python"):
        check()


def test_a_tensor_that_grew_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = type("ggml_tensor", (abi.ggml_tensor,), {"_fields_": [("more", ctypes.c_int64)]})
    monkeypatch.setattr(abi, "ggml_tensor", grown)
    with pytest.raises(LibraryMismatch, match=r"ggml_tensor_overhead\(\) is 376 .* 368"):
        check()


def test_a_type_with_another_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GGML_QUANT_SIZES, GGMLQuantizationType.Q4_K, (256, 210))
    words = r"the block of Q4_K is \(256, 210\) by the mirror, \(256, 144\) by the library"
    with pytest.raises(LibraryMismatch, match=words):
        check()


def test_another_api_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "GGML_BACKEND_API_VERSION", 6)
    with pytest.raises(LibraryMismatch, match="api_version is 6 by the mirror, 2 by the library"):
        check()


def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIGNATURES, "ggml_mul_mat_by_magic", (ctypes.c_void_p,))
    with pytest.raises(LibraryMismatch, match="has no function ggml_mul_mat_by_magic"):
        Library(library().structs)


def test_a_refusal_releases_what_the_check_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    loaded = library()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            if name.endswith("_free"):
                released.append(name)
            return getattr(loaded, name)

    swap(monkeypatch, "ggml_backend_i", "graph_compute", "event_wait")
    with pytest.raises(LibraryMismatch, match="graph_compute of the CPU device is empty"):
        selftest.check(Counting())
    assert sorted(released) == ["ggml_backend_buffer_free", "ggml_backend_free", "ggml_free"]
