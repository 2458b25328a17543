"""The flags that an owner would tune llama.cpp to, for a file and so much device memory: pure.

As many layers' experts on the device as fit beside everything else, the first layers' on the CPU
(`--n-cpu-moe`), nothing mapped, flash attention as here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from offload.model import ModelFacts, is_experts, layer_of

UBATCHES = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class TunedLlama:
    """llama.cpp's flags for one file: what it is opened with, and how that is written."""

    n_cpu_moe: int  # layers, counted from the first, whose experts the CPU computes
    n_dense_layers_on_cpu: int  # of a dense model, or where even all experts on the CPU is too much
    n_ubatch: int
    on_gpu: bool

    def cpu_weights(self) -> str:
        """A pattern of the weights that stay in host memory; empty if there are none."""
        parts = []
        if self.n_cpu_moe:
            layers = "|".join(map(str, range(self.n_cpu_moe)))
            parts.append(rf"blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps")
        if self.n_dense_layers_on_cpu:
            layers = "|".join(map(str, range(self.n_dense_layers_on_cpu)))
            parts.append(rf"blk\.({layers})\.(attn|ffn)_[a-z_]+\.weight")
        return "|".join(parts)

    def command_line(self, path: str) -> str:
        """The llama-server command line that means the same."""
        flags = [f"llama-server -m {path}", f"-ub {self.n_ubatch} -b {max(2048, self.n_ubatch)}"]
        if self.on_gpu:
            flags.append("-ngl 99")
        if self.n_cpu_moe:
            flags.append(f"--n-cpu-moe {self.n_cpu_moe} --no-mmap")
        if self.n_dense_layers_on_cpu:
            flags.append(f"-ot '{self.cpu_weights()}=CPU'")
        return " ".join(flags)


def tune_for(
    facts: ModelFacts, *, vram_bytes: int | None, reserve_bytes: int, n_ubatch: int
) -> TunedLlama:
    """`vram_bytes` None: no GPU. `reserve_bytes`: KV cache and compute buffers at this ubatch."""
    if vram_bytes is None:
        return TunedLlama(0, 0, n_ubatch, on_gpu=False)
    entries = [place.entry for place in facts.weights.values()]
    # llama.cpp keeps the input embeddings on the CPU.
    total = sum(e.size_bytes for e in entries if not e.name.startswith("token_embd."))
    left = vram_bytes - reserve_bytes - total
    n_cpu_moe = n_dense = 0
    for layer in range(facts.n_layers):
        if left >= 0:
            break
        left += sum(e.size_bytes for e in entries if is_experts(e) and layer_of(e.name) == layer)
        n_cpu_moe = layer + 1 if facts.n_experts else 0
    pattern = re.compile(r"blk\.\d+\.(attn|ffn)_[a-z_]+\.weight$")
    for layer in range(facts.n_layers):
        if left >= 0:
            break
        left += sum(
            e.size_bytes
            for e in entries
            if not is_experts(e) and layer_of(e.name) == layer and pattern.match(e.name)
        )
        n_dense = layer + 1
    return TunedLlama(n_cpu_moe, n_dense, n_ubatch, on_gpu=True)
