"""Writes models whose routers cannot be swayed by rounding, so that every wrong row shows.

The first values of a token's embedding, one per expert, are 0 except for the experts that it
chooses. Layers add nothing to these values, so that all routers read them as they are. The chosen
experts have about equal weights, so that each of them counts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.synth import write_preset
from offload.ggml.gguf import read_header
from offload.model_file import read_facts

_LEAST, _MOST = 4.0, 4.5  # embedding's values of the chosen experts; all others deviate by 1
# Rows are whole blocks of k-quants. 16 tokens do not use all experts, so slots remain to compute
# ahead with.
N_EMBD, N_FF_EXP, N_EXPERTS = 256, 256, 64


def write_decisive(path: Path, quant: str, seed: int = 1) -> None:
    """Write a small qwen3moe with experts of type `quant` (such as "q4_K")."""
    types = f"q8_0,experts={quant},embedding=f32"
    write_preset("qwen3-30b-a3b", path, quant=types, seed=seed,
                 n_embd=N_EMBD, n_ff_exp=N_FF_EXP, n_expert=N_EXPERTS)  # fmt: skip
    facts, rng = read_facts(path), np.random.default_rng(seed)
    n_used = facts.number("expert_used_count")
    values = np.memmap(path, np.uint8, "r+")
    for entry in read_header(path).tensors:
        data = values[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        kind = entry.name.split(".", 2)[-1]
        if entry.name == "token_embd.weight":
            rows = data.view(np.float32).reshape(-1, N_EMBD)
            rows[:, :N_EXPERTS] = 0
            for row in rows:
                row[rng.choice(N_EXPERTS, n_used, replace=False)] = np.linspace(
                    _LEAST, _MOST, n_used
                )
        elif kind == "ffn_gate_inp.weight":
            router = data.view(np.float32).reshape(N_EXPERTS, -1)
            router[:] = 0
            router[np.arange(N_EXPERTS), rng.permutation(N_EXPERTS)] = 1
        # Blocks of zeros are zeros in all types.
        elif kind == "attn_output.weight":
            data.reshape(N_EMBD, -1)[:N_EXPERTS] = 0
        elif kind == "ffn_down_exps.weight":
            data.reshape(N_EXPERTS, N_EMBD, -1)[:, :N_EXPERTS] = 0
    values.flush()


def chosen_experts(path: Path, layer: int, token: int) -> NDArray[np.intp]:
    """The experts that a token chooses in a layer, [n used]."""
    entries = {entry.name: entry for entry in read_header(path).tensors}
    values = np.memmap(path, np.uint8, "r")

    def read(name: str) -> NDArray[np.float32]:
        entry = entries[name]
        data = values[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        return data.view(np.float32).reshape(-1, N_EMBD)

    router = read(f"blk.{layer}.ffn_gate_inp.weight")
    return np.flatnonzero(router @ read("token_embd.weight")[token])
