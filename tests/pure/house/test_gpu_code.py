"""The code for NVIDIA GPUs that a library holds, and what it says of cards and drivers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from gpu_libraries import fatbin, library
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.ggml.drivers import Card, CudaDriver, Version
from offload.ggml.gpu_code import Code, GpuCode, NotReadable, gpu_code

RELEASE = (
    *map(Code, [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0)]),
    Code((9, 0), ptx=(9, 0)),
    Code((12, 0), "a"),
)
CUDA_12 = (*map(Code, [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0)]), Code((9, 0), ptx=(8, 4)))
CODES = st.builds(
    Code,
    st.tuples(st.integers(5, 12), st.integers(0, 9)),
    st.sampled_from(["", "a", "f"]),
    st.none() | st.tuples(st.integers(7, 9), st.integers(0, 9)),
)


def held(*codes: Code, cuda: int = 13) -> GpuCode:
    return GpuCode(dict.fromkeys(codes, 1), cuda)


@settings(max_examples=60)
@given(
    containers=st.lists(st.lists(CODES, max_size=4), max_size=3),
    n_bytes=st.integers(0, 9),
    cuda=st.integers(11, 14),
)
def test_what_is_written_is_read(
    containers: list[list[Code]],
    n_bytes: int,
    cuda: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("gpu") / "libggml-cuda.so"
    parts = [fatbin(codes, 8 * n_bytes) for codes in containers]
    found = gpu_code(library(path, *parts, needs=f"libcudart.so.{cuda}"))
    written = [code for codes in containers for code in codes]
    assert found.cuda == cuda
    assert found.n_bytes == {c: written.count(c) * (64 + 8 * n_bytes) for c in written}


@settings(max_examples=60)
@given(cut=st.integers(0, 400), junk=st.binary(max_size=40), at=st.integers(0, 500))
def test_a_damaged_file_is_refused_or_read(
    cut: int, junk: bytes, at: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = library(tmp_path_factory.mktemp("gpu") / "lib.so", fatbin(RELEASE[:2]))
    whole = path.read_bytes()
    path.write_bytes((whole[:at] + junk + whole[at + len(junk) :])[: len(whole) - cut])
    with contextlib.suppress(NotReadable):
        assert gpu_code(path).words


def test_the_words_name_each_architecture_once_machine_code_first() -> None:
    assert held(*RELEASE).words == (
        "CUDA 13, code for compute capability 7.5, 8.0, 8.6, 8.9, 9.0, 12.0a and PTX 9.0"
    )
    assert GpuCode({}, None).words == "CUDA, no code"


@pytest.mark.parametrize(
    ("codes", "card", "runs"),
    [
        (RELEASE, (7, 5), True),
        (RELEASE, (8, 7), True),  # runs 8.6's machine code
        (RELEASE, (10, 0), True),  # PTX
        (RELEASE, (12, 1), True),  # PTX, not 12.0a
        (RELEASE, (7, 0), False),
        ((Code((12, 0), "a"),), (12, 1), False),
        ((Code((12, 0), "f"),), (12, 1), True),
        ((Code((9, 0), "a", (9, 0)),), (10, 0), False),
        ((Code((8, 9)),), (8, 6), False),
        ((Code((8, 9)),), (9, 0), False),
    ],
)
def test_cards_run_code_of_their_own_kind_and_older_ptx(
    codes: tuple[Code, ...], card: Version, runs: bool
) -> None:
    assert any(code.runs_on(card) for code in codes) is runs
    why = held(*codes).reason_on(Card("RTX X", card), CudaDriver((13, 0)))
    assert (why == "") is runs


@pytest.mark.parametrize(
    ("codes", "cuda", "card", "driver", "words"),
    [
        # a driver for an older CUDA: the number, the limit and the remedy
        (RELEASE, 13, (8, 9), (12, 4), ("CUDA 12.4", "CUDA 13", "580.65 or newer", "Vulkan")),
        (CUDA_12, 12, (8, 9), (11, 8), ("CUDA 11.8", "CUDA 12", "525.60 or newer")),
        # a minor version does not matter for machine code, but for PTX
        (CUDA_12, 12, (8, 9), (12, 0), ()),
        (CUDA_12, 12, (12, 0), (12, 8), ()),
        (CUDA_12, 12, (12, 0), (12, 0), ("compute capability 12.0", "CUDA 12.4", "runs CUDA 12.0")),
        ((Code((9, 0), ptx=(8, 7)),), 12, (10, 0), (12, 7), ("a driver for CUDA 12.8",)),
        ((Code((9, 0), ptx=(9, 1)),), 13, (10, 0), (13, 1), ()),
        # a card that is too old, or that the library leaves out
        (RELEASE, 13, (6, 1), (13, 0), ("6.1) is older", "7.5", "scripts/setup --gpu cuda")),
        ((Code((8, 9)),), 13, (9, 0), (13, 0), ("no code for", "9.0)", "8.9", "Vulkan")),
        # a driver that does not answer
        (RELEASE, 13, (8, 9), None, ()),
        (RELEASE, 13, (10, 0), None, ()),
        # a library of another kind
        ((), 13, (8, 9), (13, 0), ()),
    ],
)
def test_a_sentence_has_the_number_the_limit_and_the_remedy(
    codes: tuple[Code, ...],
    cuda: int,
    card: Version,
    driver: Version | None,
    words: tuple[str, ...],
) -> None:
    why = held(*codes, cuda=cuda).reason_on(Card("Card", card), CudaDriver(driver))
    assert (why == "") is (not words)
    assert [word for word in words if word not in why] == []
    assert "\n" not in why


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.dylib"
    path.write_bytes(b"\xcf\xfa\xed\xfe" * 40)
    with pytest.raises(NotReadable, match=r"x\.dylib: not a library"):
        gpu_code(path)
