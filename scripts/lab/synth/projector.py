"""Writes small random projectors for images (mmproj), in shapes that libmtmd loads.

The tensors' names are those of llama.cpp's tools/mtmd/clip-impl.h.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

ProjectorKind = Literal["gemma3", "qwen2.5vl_merger"]
_WIDTH, _HIDDEN, _HEADS, _LAYERS = 32, 64, 2, 2
_PATCH = 14  # pixels
_GEMMA_IMAGE = 112  # pixels: 8 x 8 patches, of which 2 x 2 become a token


def write_projector(path: Path, kind: ProjectorKind, n_embd: int, seed: int = 0) -> Path:
    """Write a projector for a text model whose tokens have `n_embd` values. Returns the path.

    "gemma3" makes 16 tokens of every image, which see each other. "qwen2.5vl_merger" makes tokens
    in rows and columns, as many as the image has squares of 28 pixels.
    """
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_silu" if kind != "gemma3" else "clip.use_gelu", True)
    for name, number in {
        "embedding_length": _WIDTH,
        "attention.head_count": _HEADS,
        "feed_forward_length": _HIDDEN,
        "block_count": _LAYERS,
        "projection_dim": n_embd,
        "image_size": _GEMMA_IMAGE if kind == "gemma3" else 560,
        "patch_size": _PATCH,
    }.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def tensor(name: str, *shape: int) -> None:
        scale = 1.0 if len(shape) == 1 else 1 / np.sqrt(np.prod(shape[1:]))
        values: NDArray[np.float32] = rng.standard_normal(shape).astype(np.float32) * np.float32(
            scale
        )
        writer.add_tensor(name, values)

    def weight(name: str, n_out: int, n_in: int) -> None:
        tensor(f"{name}.weight", n_out, n_in)
        tensor(f"{name}.bias", n_out)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))
        if kind == "gemma3":
            tensor(f"{name}.bias", _WIDTH)

    tensor("v.patch_embd.weight", _WIDTH, 3, _PATCH, _PATCH)
    for layer in range(_LAYERS):
        block = f"v.blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            weight(f"{block}.{name}", _WIDTH, _WIDTH)
        weight(f"{block}.ffn_up", _HIDDEN, _WIDTH)
        weight(f"{block}.ffn_down", _WIDTH, _HIDDEN)
        norm(f"{block}.ln1")
        norm(f"{block}.ln2")
        if kind != "gemma3":
            weight(f"{block}.ffn_gate", _HIDDEN, _WIDTH)
    norm("v.post_ln")
    if kind == "gemma3":
        writer.add_uint32("clip.vision.projector.scale_factor", 2)
        tensor("v.patch_embd.bias", _WIDTH)
        tensor("v.position_embd.weight", (_GEMMA_IMAGE // _PATCH) ** 2, _WIDTH)
        tensor("mm.input_projection.weight", _WIDTH, n_embd)
        writer.add_tensor("mm.soft_emb_norm.weight", np.ones(_WIDTH, np.float32))
    else:
        writer.add_uint32("clip.vision.n_wa_pattern", 2)
        tensor("v.patch_embd.weight.1", _WIDTH, 3, _PATCH, _PATCH)
        weight("mm.0", 4 * _WIDTH, 4 * _WIDTH)
        weight("mm.2", n_embd, 4 * _WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
