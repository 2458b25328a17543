"""The number of kernels of a decode's graph, by architecture. Pure.

Each node of a decode's graph that is no view starts a kernel. A kernel takes a few microseconds
however little it computes, and models differ in their number: 19 a layer in dense models, 38 in
Qwen3-30B-A3B, 87 in Qwen3.8-Flash-Next, whose layers have gated delta nets, an indexer and
hyper-connections. `scripts/lab/run graph-nodes` counts them in graphs that the library builds.
"""

from __future__ import annotations

PLAIN_LAYER = 40.0  # kernels of a layer of an architecture that was not counted
# Kernels of one token's decode, divided by the number of layers, of the largest published model of
# each architecture (scripts/lab/graph_nodes.json).
_PER_LAYER = {
    "deepseek2": 54.7, "deepseek32": 73.7, "deepseek4": 125.1, "gemma2": 24.2, "gemma3n": 67.6,
    "glm-dsa": 67.2, "glm4moe": 47.3, "glm5-next": 97.5, "gpt-oss": 35.1, "kimi-k3": 118.9,
    "llama": 19.1, "llama4": 26.4, "minimax-m2": 39.1, "minimax-m3": 70.6, "qwen2": 22.1,
    "qwen3": 23.2, "qwen35moe": 55.9, "qwen3moe": 38.1, "qwen3next": 60.1, "qwen4exp": 86.8,
}  # fmt: skip


def kernels_per_layer(architecture: str) -> float:
    """Return the mean number of kernels of a layer in the decode of one token."""
    return _PER_LAYER.get(architecture, PLAIN_LAYER)
