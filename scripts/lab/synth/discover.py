"""Asks the library which tensors a shape has, and chooses their types and values.

No list of tensors is kept here: names and shapes come from the library that will load the file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.synth.header import padded, write_header
from lab.synth.mixture import types_of
from lab.synth.pool import Tensor
from lab.synth.shape import ImpossibleShape, Shape
from lab.synth.values import fill_of, routed
from lab.synth.vocabulary import Entry, no_tokenizer
from offload.errors import OffloadError
from offload.ggml.wanted_tensors import WantedTensor, wanted_tensors

# Scales of a quantisation that is not written here; the library offers them for every matrix.
_NEVER = (r"\.scale$", r"\.input_scale$", r"\.lora_[ab]$")
_EXPERT_SCALE = re.compile(r"\.ffn_(gate|up|down)_exps\.scale$")


@dataclass(frozen=True)
class Plan:
    """A file that could be written: its header's contents and every tensor."""

    shape: Shape
    tokenizer: tuple[Entry, ...]
    tensors: tuple[Tensor, ...]
    size_bytes: int  # of the whole file


def plan(shape: Shape, tokenizer: tuple[Entry, ...], *, isolated: bool = False) -> Plan:
    """The parts of `shape`'s file. Takes no memory for weights, whatever their size.

    `isolated` asks in a process of its own first, for metadata that nobody has checked: the library
    aborts on some values. Raises ImpossibleShape, BadModel, or BadRequest for unknown types.
    """
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "header.gguf"
        write_header(header, shape, no_tokenizer(), ())
        if isolated:
            _survives(header)
        wanted = [t for t in _all_tensors(header, shape) if not _left_out(t, shape)]
        names = {t.name for t in wanted}
        tied = "output.weight" not in names
        n_layers, n_dense = shape.number("block_count"), shape.number("leading_dense_block_count")
        types = types_of(shape.quant, wanted, n_layers, n_dense, tied=tied)
        tensors = tuple(
            Tensor(t.name, t.shape, type_, routed(fill_of(t, shape, tied), t, shape, names))
            for t, type_ in zip(wanted, types, strict=True)
        )
        n_header = write_header(header, shape, tokenizer, tensors)
    return Plan(shape, tokenizer, tensors, n_header + sum(padded(t.n_bytes) for t in tensors))


def _all_tensors(header: Path, shape: Shape) -> Iterator[WantedTensor]:
    """With gate and up apart, as published files have them: asked this way, the library fuses."""
    for tensor in wanted_tensors(header):
        if "ffn_gate_up_exps" not in tensor.name or shape.fused_experts:
            yield tensor
            continue
        n_embd, n_ff_twice, *n_expert = tensor.shape
        for half in ("ffn_gate_exps", "ffn_up_exps"):
            name = tensor.name.replace("ffn_gate_up_exps", half)
            yield WantedTensor(name, (n_embd, n_ff_twice // 2, *n_expert))
            if name.endswith(".weight"):  # offered where gate and up are apart
                yield WantedTensor(f"{name.removesuffix('weight')}scale", tuple(n_expert))


def _left_out(tensor: WantedTensor, shape: Shape) -> bool:
    if shape.expert_scales and _EXPERT_SCALE.search(tensor.name):
        return False
    return any(re.search(pattern, tensor.name) for pattern in (*_NEVER, *shape.without))


def _survives(header: Path) -> None:
    command = [sys.executable, "-m", "lab.synth.discover", str(header)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((x for x in lines if "GGML_ASSERT" in x), lines[-1] if lines else "no reason")
        raise ImpossibleShape(f"the library cannot build this shape: {reason.strip()}")


def _main() -> None:
    try:
        wanted_tensors(Path(sys.argv[1]))
    except OffloadError as e:
        sys.exit(str(e))


if __name__ == "__main__":
    _main()
