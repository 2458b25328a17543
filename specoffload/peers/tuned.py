"""The flags that an owner would tune llama.cpp to, for a file and so much device memory: pure.

As many layers' experts on the device as fit beside everything else, the first layers' on the CPU
(`--n-cpu-moe`), nothing mapped, flash attention as here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.model import ModelFacts, TensorEntry, is_experts, layer_of

UBATCHES = (512, 1024, 2048, 4096)
# A layer's products. Its experts too: they have gone before dense weights do.
_PRODUCTS = r"blk\.{}\.(attn|ffn)_[a-z_]+\.weight"


@dataclass(frozen=True)
class TunedLlama:
    """llama.cpp's flags for one file: what it is opened with, and how that is written."""

    n_cpu_moe: int  # layers, counted from the first, whose experts the CPU computes
    n_dense_layers_on_cpu: int  # of a dense model, or where even all experts on the CPU is too much
    n_ubatch: int
    on_gpu: bool
    moe_cache_mib: int = 0  # device memory for an LRU cache of the experts on the CPU; 0: none

    def cpu_weights(self) -> str:
        """A pattern of the weights that stay in host memory; empty if there are none."""
        parts = []
        if self.n_cpu_moe:
            layers = "|".join(map(str, range(self.n_cpu_moe)))
            parts.append(rf"blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps")
        if self.n_dense_layers_on_cpu:
            layers = "|".join(map(str, range(self.n_dense_layers_on_cpu)))
            parts.append(_PRODUCTS.format(f"({layers})"))
        return "|".join(parts)

    @property
    def n_batch(self) -> int:
        """llama.cpp's default, or the ubatch where that is larger."""
        return max(2048, self.n_ubatch)

    def arguments(self) -> list[str]:
        """llama-server's flags that mean the same."""
        flags = ["-ub", str(self.n_ubatch), "-b", str(self.n_batch)]
        if self.on_gpu:
            flags += ["-ngl", "99"]
        if self.n_dense_layers_on_cpu:
            flags += ["-ot", f"{self.cpu_weights()}=CPU", "--no-mmap"]
        elif self.n_cpu_moe:
            flags += ["--n-cpu-moe", str(self.n_cpu_moe), "--no-mmap"]
        if self.moe_cache_mib:
            flags += ["--moe-cache-mib", str(self.moe_cache_mib)]  # only newer builds know it
        return flags

    def command_line(self, path: str) -> str:
        """The llama-server command line that means the same."""
        return shlex.join(["llama-server", "-m", path, *self.arguments()])


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
    products = [e for e in entries if re.fullmatch(_PRODUCTS.format(r"\d+"), e.name)]
    n_cpu_moe, left = _moved(left, _by_layer([e for e in entries if is_experts(e)]))
    n_dense, left = _moved(left, _by_layer([e for e in products if not is_experts(e)]))
    return TunedLlama(n_cpu_moe, n_dense, n_ubatch, on_gpu=True)


def with_expert_caches(facts: ModelFacts, tuned: TunedLlama) -> list[TunedLlama]:
    """`tuned`, and the same device memory with an expert cache instead of all, or of half, of the
    layers whose experts are resident."""
    layers = _by_layer(facts.expert_weights)
    n_resident = sum(size > 0 for size in layers[tuned.n_cpu_moe :])
    found = [tuned]
    if not tuned.on_gpu or tuned.n_dense_layers_on_cpu:
        return found
    for n_moved in dict.fromkeys((n_resident, n_resident // 2)):
        last = tuned.n_cpu_moe
        while sum(size > 0 for size in layers[tuned.n_cpu_moe : last]) < n_moved:
            last += 1
        mib = sum(layers[tuned.n_cpu_moe : last]) >> 20
        if mib:
            found.append(replace(tuned, n_cpu_moe=last, moe_cache_mib=mib))
    return found


def _by_layer(entries: Sequence[TensorEntry]) -> list[int]:
    """Bytes by layer, up to the last that has any."""
    sizes = [0] * (1 + max((layer_of(e.name) for e in entries), default=-1))
    for entry in entries:
        sizes[layer_of(entry.name)] += entry.size_bytes
    return sizes


def _moved(left_bytes: int, layers: Sequence[int]) -> tuple[int, int]:
    """(layers from the first that go to the CPU until `left_bytes` is not negative, what is left
    then): all of them if it stays so."""
    n = 0
    while left_bytes < 0 and n < len(layers):
        left_bytes += layers[n]
        n += 1
    return n, left_bytes
