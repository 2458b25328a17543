"""Files whose tensors have other types than kernels read end no process by a signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from lab.attack.types_part import with_type
from lab.synth import write_preset
from offload.errors import BadModel
from offload.model_file import read_facts

OPENED = """
import sys
from lab.options import engine_options
from offload.engine import open_engine
with open_engine(sys.argv[1], engine_options(device="cpu", n_ctx=64)) as engine:
    engine.sequences.extend(0, [1, 2, 3])
"""
# Matrices, routers, experts, norms, biases, recurrent states and convolutions.
PRESETS = ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "qwen3.5-35b-a3b", "deepseek-v4-flash")


def kinds_of(path: Path) -> dict[str, str]:
    """Return a tensor of each kind, by its name without the layer's number."""
    names = [tensor.name for tensor in GGUFReader(path).tensors]
    return {".".join(part for part in n.split(".") if not part.isdecimal()): n for n in names}


@pytest.mark.parametrize("preset", PRESETS)
def test_no_tensor_may_have_whole_numbers(preset: str, models: Path, tmp_path: Path) -> None:
    path = write_preset(preset, models / f"types-{preset}.gguf", size="tiny", seed=1)
    read_facts(path)
    changed = tmp_path / "changed.gguf"
    for name in kinds_of(path).values():
        for kind in (GGMLQuantizationType.I32, GGMLQuantizationType.F64):
            raw = with_type(path, name, kind)
            assert raw is not None
            changed.write_bytes(raw)
            with pytest.raises(BadModel, match=rf"{name} has the type {kind.name.lower()}, "):
                read_facts(changed)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blk.0.ffn_gate_inp.weight", GGMLQuantizationType.I32),
        ("blk.1.attn_q.weight", GGMLQuantizationType.F64),
        ("blk.1.ffn_up_exps.weight", GGMLQuantizationType.I8),
        ("blk.1.attn_norm.weight", GGMLQuantizationType.F16),
    ],
)
def test_a_process_says_a_sentence(
    name: str, kind: GGMLQuantizationType, models: Path, tmp_path: Path
) -> None:
    path = write_preset("qwen3-30b-a3b", models / "types-moe.gguf", size="tiny", seed=1)
    raw = with_type(path, name, kind)
    assert raw is not None
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(raw)
    ended = subprocess.run(
        [sys.executable, "-c", OPENED, str(changed)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1, "a negative code is a signal"
    assert f"{name} has the type {kind.name.lower()}" in ended.stderr.splitlines()[-1]
