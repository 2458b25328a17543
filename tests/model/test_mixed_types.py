"""Types mixed in one layer are computed alike from the disk and from RAM, in the file's layout."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray

from lab.options import engine_options
from lab.synth import write_preset
from lab.synth.library import quantize
from offload.engine import open_engine

_ALIGNED = 32
TYPES = {
    "ffn_gate_exps.weight": GGMLQuantizationType.MXFP4,
    "ffn_up_exps.weight": GGMLQuantizationType.NVFP4,
    "ffn_down_exps.weight": GGMLQuantizationType.TQ2_0,
    "ffn_gate_inp.weight": GGMLQuantizationType.F16,
}


def mixed(path: Path, whole: Path) -> Path:
    """Write the f32 model `whole` with the experts and the router in TYPES."""
    reader = GGUFReader(whole)
    base = reader.data.ctypes.data
    begin = min(t.field.parts[0].ctypes.data for t in reader.tensors) - base
    infos, data = b"", bytearray()
    for tensor in reader.tensors:
        shape, type_, raw = [*map(int, tensor.shape)], tensor.tensor_type, tensor.data.tobytes()
        wanted = TYPES.get(tensor.name.partition(".")[2].partition(".")[2])
        if wanted is not None:
            values, type_ = np.frombuffer(raw, np.float32).reshape(-1, shape[0]), wanted
            n_elements, n_bytes = GGML_QUANT_SIZES[wanted]
            row_bytes = shape[0] // n_elements * n_bytes
            is_half = wanted == GGMLQuantizationType.F16
            found = values.astype(np.float16) if is_half else None
            raw = (quantize(values, int(wanted), row_bytes) if found is None else found).tobytes()
        text = tensor.name.encode()
        infos += struct.pack("<Q", len(text)) + text
        infos += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, int(type_), len(data))
        data += raw + bytes(-len(raw) % _ALIGNED)
    head = whole.read_bytes()[:begin] + infos
    path.write_bytes(head + bytes(-len(head) % _ALIGNED) + bytes(data))
    return path


def logits(path: Path, ram_bytes: int | None, *, repack: bool | None) -> NDArray[np.float32]:
    options = engine_options(
        device="cpu", n_ctx=256, n_ubatch=64, n_outputs=64, n_threads=1, n_threads_batch=1,
        repack=repack, ram_bytes=ram_bytes,
    )  # fmt: skip
    with open_engine(path, options) as engine:
        sizes = (40, 7, 1, 1, 3)
        texts = [[(13 * i + 5 * n) % engine.n_vocab for i in range(n)] for n in sizes]
        return np.concatenate([np.array(engine.sequences.extend(0, text)) for text in texts])


@pytest.fixture(scope="module")
def path(models: Path) -> Path:
    size = {"n_embd": 512, "n_ff_exp": 512, "n_layer": 6, "n_expert": 8}
    whole = write_preset(
        "qwen3-30b-a3b", models / "mixed-whole.gguf", size="tiny", seed=3, quant="f32", **size
    )
    return mixed(models / "mixed.gguf", whole)


def test_the_disk_gives_the_bits_of_the_files_layout(path: Path) -> None:
    from_disk = logits(path, 4 << 20, repack=None)
    np.testing.assert_array_equal(from_disk, logits(path, None, repack=False))


def test_another_layout_only_rounds_differently(path: Path) -> None:
    """The first token meets no earlier choice of experts that could have become another one."""
    file, repacked = (logits(path, None, repack=repack)[0] for repack in (False, True))
    assert np.abs(file - repacked).max() < 1e-3 * file.std()
