"""Model files with one tensor of another type: each must run, or be refused in one sentence."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

from lab.attack import ATTACK
from lab.attack.headers import ARCHITECTURES, WORDS, import_all, run_forked
from lab.attack.outcome import Breach, Outcome
from lab.synth import write_preset

_ALIGNED = 32


def with_type(path: Path, name: str, kind: GGMLQuantizationType) -> bytes | None:
    """Return a file's bytes with zeros of another type in a tensor. None: its rows do not fit."""
    reader = GGUFReader(path)
    base = reader.data.ctypes.data
    begin = min(t.field.parts[0].ctypes.data for t in reader.tensors) - base
    infos, data = b"", bytearray()
    for tensor in reader.tensors:
        shape, type_, raw = [*map(int, tensor.shape)], tensor.tensor_type, tensor.data.tobytes()
        if tensor.name == name:
            n_elements, n_bytes = GGML_QUANT_SIZES[kind]
            if shape[0] % n_elements:
                return None
            type_, raw = kind, bytes(int(np.prod(shape)) // n_elements * n_bytes)
        text = tensor.name.encode()
        infos += struct.pack("<Q", len(text)) + text
        infos += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, int(type_), len(data))
        data += raw + bytes(-len(raw) % _ALIGNED)
    head = path.read_bytes()[:begin] + infos
    return head + bytes(-len(head) % _ALIGNED) + bytes(data)


def types_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Run one file for each number."""
    outcome = Outcome("types", len(numbers))
    paths = [
        write_preset(name, folder / f"{name}.gguf", size="tiny", seed=1) for name in ARCHITECTURES
    ]
    names = [[tensor.name for tensor in GGUFReader(path).tensors] for path in paths]
    import_all()
    for number in numbers:
        rng = Random(f"types {seed} {number}")
        which = number % len(paths)
        name, kind = rng.choice(names[which]), rng.choice(list(GGMLQuantizationType))
        raw = with_type(paths[which], name, kind)
        if raw is None:
            outcome.tally["does not fit"] += 1
            continue
        changed = folder / "changed.gguf"
        changed.write_bytes(raw)
        ended, breach = run_forked([*WORDS, str(changed)], folder)
        outcome.tally[ended] += 1
        if breach:
            what = f"{ARCHITECTURES[which]}: {name} as {kind.name}: {breach}"
            command = f"{ATTACK} --part types --seed {seed} --only {number}"
            outcome.breaches.append(Breach(what, command))
    return outcome
