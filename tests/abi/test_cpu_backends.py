"""The CPU backend's functions are found in its registry, if the library does not export them."""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import llama_cpp.llama_cpp as structs
import pytest

from offload.errors import LibraryMismatch
from offload.ggml.library import lib
from offload.ggml.library.lib import Library, library


@pytest.fixture
def parted() -> Library:
    """The installed library, as if its CPU backend were a library of its own."""
    library()  # makes the registry
    made = Library(structs)
    made._missing = tuple(lib._OF_CPU_BACKEND)
    return made


def address(function: object) -> int | None:
    return C.cast(function, C.c_void_p).value  # type: ignore[arg-type]


@pytest.mark.parametrize("name", lib._OF_CPU_BACKEND)
def test_the_registry_gives_the_function_of_that_name(
    name: str, parted: Library, tmp_path: Path
) -> None:
    exported = address(getattr(library(), name))
    delattr(parted, name)
    parted.load_backends(tmp_path)
    assert address(getattr(parted, name)) == exported


def test_a_folder_without_a_backend_for_this_processor_is_said(
    parted: Library, tmp_path: Path
) -> None:
    parted.ggml_backend_dev_by_type = lambda _: None
    with pytest.raises(
        LibraryMismatch, match="none of the CPU backends in .* suits this processor"
    ):
        parted.load_backends(tmp_path)
