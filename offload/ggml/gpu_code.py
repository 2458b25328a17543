"""Reads for which NVIDIA GPUs a library holds code, and says if a driver and its cards suit it.

nvcc puts code into the section .nv_fatbin of an ELF file, as a row of containers. Each has entries
for compute capabilities: machine code, or PTX that the driver compiles at the first start. Their
headers are described in https://github.com/RWTH-ACS/cricket (cpu/cpu-elf2.c). Only headers are
read, so a library of 500 MB takes milliseconds.

scripts/setup uses this module before any dependency is installed, so it imports nothing but the
standard library.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from offload.ggml.drivers import OLDEST_DRIVERS, Card, CudaDriver, Version, dotted

_ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_SECTION = ".nv_fatbin"
_DYNAMIC, _DYNAMIC_STRINGS = ".dynamic", ".dynstr"
_NEEDED_TAG = 1
_RUNTIME = "libcudart.so."
_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2
_ALIGNMENT = 8  # bytes, between containers
# Bits of an entry's flags: code for one compute capability alone (sm_120a), or for its family.
_EXACT, _FAMILY = 0x100000, 0x200000
# The CUDA that first compiles a version of PTX, where it is not simply that of the same minor
# number (https://docs.nvidia.com/cuda/parallel-thread-execution/#release-notes).
_CUDA_OF_PTX: dict[Version, Version] = {(8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9)}


class NotReadable(Exception):
    """The file is no library for Linux, or its code for GPUs is damaged."""


@dataclass(frozen=True, order=True)
class Code:
    """Code for one compute capability. `suffix`: "a" for it alone, "f" for its family, or ""."""

    compute: Version
    suffix: str = ""
    ptx: Version | None = None  # version of PTX; None: machine code

    def __str__(self) -> str:
        return f"{dotted(self.compute)}{self.suffix}"

    def runs_on(self, card: Version) -> bool:
        """True if a card of this compute capability runs the code, if its driver can."""
        if self.suffix == "a":
            return card == self.compute
        if self.ptx is not None and not self.suffix:
            return card >= self.compute
        return card[0] == self.compute[0] and card >= self.compute

    @property
    def compiler(self) -> Version | None:
        """The oldest CUDA whose drivers compile this PTX. None for machine code."""
        if self.ptx is None:
            return None
        major, minor = self.ptx
        return _CUDA_OF_PTX.get(self.ptx, (major + 4, minor))


@dataclass(frozen=True)
class GpuCode:
    """The code for GPUs in a library. `cuda` is the major version of its CUDA runtime."""

    n_bytes: dict[Code, int]
    cuda: int | None = None

    @property
    def codes(self) -> tuple[Code, ...]:
        return tuple(sorted(self.n_bytes, key=lambda code: (code.ptx is not None, code)))

    @property
    def words(self) -> str:
        """Such as "CUDA 13, code for compute capability 7.5, 8.9, 12.0a, and PTX 9.0"."""
        parts = []
        for title, is_ptx in (("code for compute capability", False), ("PTX", True)):
            if names := [str(c) for c in self.codes if (c.ptx is not None) is is_ptx]:
                parts.append(f"{title} {', '.join(names)}")
        runtime = f"CUDA {self.cuda or ''}".rstrip()
        return f"{runtime}, {' and '.join(parts) or 'no code'}"

    def reason(self, driver: CudaDriver) -> str:
        """Return why the driver cannot run the library on any card, or ""."""
        if self.cuda is None or driver.cuda is None or driver.cuda[0] >= self.cuda:
            return ""
        oldest = OLDEST_DRIVERS.get(self.cuda)
        return (
            f"the NVIDIA driver runs CUDA {dotted(driver.cuda)}, and this library needs CUDA"
            f" {self.cuda}: install {f'driver {oldest}' if oldest else 'a driver'} or newer, or"
            " take the wheel for Vulkan"
        )

    def reason_on(self, card: Card, driver: CudaDriver) -> str:
        """Return why this card cannot run the library, or ""."""
        if reason := self.reason(driver):
            return reason
        fitting = [code for code in self.codes if code.runs_on(card.compute)]
        ptx = [code.compiler for code in fitting if code.compiler is not None]
        has_machine_code = len(ptx) < len(fitting)
        if has_machine_code or not self.codes or (ptx and driver.cuda is None):
            return ""
        if ptx and driver.cuda is not None:
            if min(ptx) <= driver.cuda:
                return ""
            return (
                f"{card} runs this library's PTX with a driver for CUDA {dotted(min(ptx))}, and"
                f" this one runs CUDA {dotted(driver.cuda)}: install a newer driver, or take the"
                " wheel for Vulkan"
            )
        lowest = min(code.compute for code in self.codes)
        if card.compute < lowest:
            reason = f"{card} is older than this library's oldest code, {dotted(lowest)}"
        else:
            reason = f"this library has no code for {card}: it has {self.words}"
        return (
            f"{reason}: take the wheel for Vulkan, or compile for this card "
            "(scripts/setup --gpu cuda)"
        )


def gpu_code(library: Path) -> GpuCode:
    """Return what `library` holds. Raises NotReadable, or OSError."""
    with library.open("rb") as file:
        try:
            sections = dict(_sections(file))
            return GpuCode(_sizes(file, *sections.get(_SECTION, (0, 0))), _runtime(file, sections))
        except (struct.error, ValueError, IndexError) as e:
            raise NotReadable(f"{library.name}: {e}") from e


def _read(file: BinaryIO, at: int, n_bytes: int) -> bytes:
    if at + n_bytes > file.seek(0, os.SEEK_END):
        raise ValueError("the file is cut off")
    file.seek(at)
    return file.read(n_bytes)


def _sections(file: BinaryIO) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield names of sections, with their first byte in the file and their bytes."""
    header = _read(file, 0, 64)
    if not header.startswith(_ELF):
        raise ValueError("not a library of 64 bits for Linux")
    (table,) = struct.unpack_from("<Q", header, 40)
    n_entry_bytes, n_entries, of_names = struct.unpack_from("<HHH", header, 58)
    rows = _read(file, table, n_entry_bytes * n_entries)
    headers = [struct.unpack_from("<IIQQQQ", rows, n_entry_bytes * i) for i in range(n_entries)]
    names = _read(file, *headers[of_names][4:6])
    for name, _, _, _, offset, n_bytes in headers:
        yield _text(names, name), (offset, n_bytes)


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode("utf-8", "replace")


def _runtime(file: BinaryIO, sections: dict[str, tuple[int, int]]) -> int | None:
    """Return the major version of the CUDA runtime that the library needs, or None."""
    if _DYNAMIC not in sections or _DYNAMIC_STRINGS not in sections:
        return None
    strings = _read(file, *sections[_DYNAMIC_STRINGS])
    for tag, value in struct.iter_unpack("<QQ", _read(file, *sections[_DYNAMIC])):
        if tag == _NEEDED_TAG and (name := _text(strings, value)).startswith(_RUNTIME):
            return int(name.removeprefix(_RUNTIME).partition(".")[0])
    return None


def _sizes(file: BinaryIO, first: int, n_bytes: int) -> dict[Code, int]:
    """Return bytes of code by what it is for."""
    sizes: dict[Code, int] = {}
    at = first
    while at + 16 <= first + n_bytes:
        magic, _, n_header_bytes, size = struct.unpack("<IHHQ", _read(file, at, 16))
        if magic != _MAGIC:  # a gap before the next container
            at += _ALIGNMENT
            continue
        at += n_header_bytes
        end = at + size
        if n_header_bytes < 16 or end > first + n_bytes:
            raise ValueError("a container is longer than its section, or has no header")
        while at < end:
            code, entry_bytes = _entry(_read(file, at, 48))
            if code is not None:
                sizes[code] = sizes.get(code, 0) + entry_bytes
            at += entry_bytes
    return sizes


def _entry(header: bytes) -> tuple[Code | None, int]:
    """Return what an entry is for, and its bytes."""
    kind, _, n_header_bytes, n_bytes = struct.unpack_from("<HHIQ", header, 0)
    minor, major, number = struct.unpack_from("<HHI", header, 24)
    (flags,) = struct.unpack_from("<Q", header, 40)
    if n_header_bytes < len(header):
        raise ValueError("an entry has no header")
    if kind not in (_PTX, _MACHINE_CODE):
        return None, n_header_bytes + n_bytes
    suffix = "a" if flags & _EXACT else "f" if flags & _FAMILY else ""
    compute = (number // 10, number % 10)
    version = (major, minor) if kind == _PTX else None
    return Code(compute, suffix, version), n_header_bytes + n_bytes
