"""Writes small libraries with headers of code for NVIDIA GPUs, laid out as nvcc's linker does, and
wheels that bring such a libllama."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

from offload.ggml.gpu_code import Code

_FLAGS = {"": 0x8011, "a": 0x108011, "f": 0x1208011}
_NEEDED = 1
_METADATA = """Metadata-Version: 2.4
Name: specoffload
Version: 0.1.0
Requires-Dist: numpy>=1.20
Requires-Dist: nvidia-cublas<14,>=13
Requires-Dist: pytest; extra == "dev"

A description: Requires-Dist is a header.
"""


def fatbin(codes: Sequence[Code], n_bytes: int = 24) -> bytes:
    """One container with an entry of `n_bytes` (and its header) for each of `codes`."""
    entries = b""
    for code in codes:
        major, minor = code.ptx or (1, 8)
        number = code.compute[0] * 10 + code.compute[1]
        kind = 1 if code.ptx else 2
        entries += struct.pack(
            "<HHIQIIHHI", kind, 257, 64, n_bytes, n_bytes, 0, minor, major, number
        )
        entries += struct.pack("<QQQQ", 0, _FLAGS[code.suffix], 0, n_bytes) + bytes(n_bytes)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def library(path: Path, *containers: bytes, needs: str = "libcudart.so.13") -> Path:
    """Write a library of 64 bits with these containers, 8 bytes apart, that needs `needs`."""
    strings = b"\0libm.so.6\0" + needs.encode() + b"\0"
    dynamic = struct.pack("<QQQQQQ", _NEEDED, 1, _NEEDED, 11, 0, 0)
    data = {
        ".dynamic": dynamic,
        ".dynstr": strings,
        ".nv_fatbin": bytes(8).join(containers),
        ".shstrtab": b"\0.dynamic\0.dynstr\0.nv_fatbin\0.shstrtab\0",
    }
    names, body, rows = data[".shstrtab"], b"", [bytes(64)]
    for name, content in data.items():
        place = 64 + len(body)
        at = names.index(name.encode() + b"\0")
        rows.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, place, len(content), 0, 0, 8, 0))
        body += content + bytes(-len(content) % 8)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 40, 64 + len(body))
    struct.pack_into("<HHH", header, 58, 64, len(rows), len(rows) - 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(header) + body + b"".join(rows))
    return path


def wheel_with_libllama(
    folder: Path,
    backend: str = "",
    *,
    version: str = "0.3.36",
    tag: str = "any",
    name: str = "specoffload-0.1.0",
) -> Path:
    """Write a wheel of specoffload with libllama for a backend. CUDA's has code for an RTX 4090."""
    number = {"cuda": "1cuda13-", "vulkan": "1vulkan-", "": ""}[backend]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{number}py3-none-{tag}.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("offload/engine.py", "")
        archive.writestr("llama_cpp/__init__.py", f'__version__ = "{version}"\n')
        archive.writestr("llama_cpp/lib/libllama.so", b"code")
        archive.writestr("specoffload.libs/libgomp.so", b"threads")
        archive.writestr(f"{name}.dist-info/METADATA", _METADATA)
        if backend == "cuda":
            so = library(folder / "libggml-cuda.so", fatbin([Code((8, 9))]))
            archive.write(so, "llama_cpp/lib/libggml-cuda.so")
        elif backend:
            archive.writestr(f"llama_cpp/lib/libggml-{backend}.so", b"")
    return file
