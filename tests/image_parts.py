"""Tiny models with projectors, and image files, for tests."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from lab.synth import write_preset
from lab.synth.projector import ProjectorKind, write_projector
from lab.synth.shape import Shape
from lab.synth.write import plan_shape, write

_SMALL: dict[str, Any] = {
    "block_count": 3,
    "embedding_length": 64,
    "feed_forward_length": 64,
    "context_length": 2048,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
# An image's tokens see each other in the first, and have two dimensions in the second.
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": 512,
    },
    "qwen2vl": {
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "rope.dimension_sections": (6, 5, 5, 0),
    },
}
KINDS = ("gemma3", "qwen2vl", "qwen3.5-35b-a3b")  # the last one is recurrent and has experts


def model_with_projector(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write a model of this kind and its projector, unless they are there."""
    model, projector = folder / f"images-{kind}.gguf", folder / f"images-{kind}-mmproj.gguf"
    if not projector.exists():
        n_embd, own = 64, SHAPES.get(kind)
        if own is None:
            write_preset(kind, model, seed=3)
            n_embd = 128
        else:
            shape = Shape(kind, kind, {**_SMALL, **own}, n_vocab=600)
            write(plan_shape(shape), model, 3)
        of: ProjectorKind = "gemma3" if kind == "gemma3" else "qwen2.5vl_merger"
        write_projector(projector, of, n_embd)
    return model, projector


def png(width: int, height: int, seed: int | None = 0) -> bytes:
    """A PNG file of random pixels. With `seed` None all pixels are black, so the file is small."""
    row_bytes = 3 * width
    if seed is None:
        rows = [b"\0" * (1 + row_bytes)] * height
    else:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, row_bytes), np.uint8)
        rows = [b"\0" + row.tobytes() for row in pixels]
    packer = zlib.compressobj()
    packed = b"".join(packer.compress(row) for row in rows) + packer.flush()
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", size), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def slow_jpeg(n_scans: int = 20_000, width_px: int = 3000) -> bytes:
    """A small progressive JPEG file whose scans are all empty but the first ones.

    A decoder looks at the whole picture once for each scan.
    """
    file = io.BytesIO()
    PIL.Image.new("RGB", (width_px, width_px)).save(file, "JPEG", progressive=True)
    more_of_dc = bytes([0xFF, 0xDA, 0, 8, 1, 1, 0, 0, 0, 0x10])  # refines the first values
    return file.getvalue().removesuffix(b"\xff\xd9") + n_scans * more_of_dc + b"\xff\xd9"
