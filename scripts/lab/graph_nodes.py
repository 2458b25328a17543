"""Counts the nodes of a decode's graph that need a kernel, by operation, for published models.

    scripts/lab/run graph-nodes                       count all again
    scripts/lab/run graph-nodes qwen3.8-flash-next    count these again

Each model is written with all its layers but tiny widths, and decodes one token on `sim` with flash
attention. The number of nodes follows from the number and kinds of layers, the experts of a token
and a few loops (such as those of hyper-connections), and not from widths. So these are kept. Views
need no kernel and are not counted. The result is `graph_nodes.json`. The machine model's table of
kernels (offload/times/kernels.py) comes from it, which a test checks.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab import ROOT
from lab.options import engine_options
from lab.synth import write_preset
from lab.synth.published import PUBLISHED
from lab.synth.shape import PRESETS, Shape, find_preset, resolve
from offload.engine import open_engine
from offload.ggml.node_table import NodeTable, operations
from offload.stream.device import StreamingDevice
from offload.times.min_batch import MinBatch

RECORD = ROOT / "scripts" / "lab" / "graph_nodes.json"
MORE = ("glm-4.5-air", "gpt-oss-20b", "qwen3.5-35b-a3b", "qwen3-0.6b", "llama-3.3-70b",
        "gemma-2-27b", "mistral-large", "deepseek-v2-lite")  # fmt: skip
NAMES = tuple(
    dict.fromkeys((*(find_preset(preset).name for preset, _ in PUBLISHED.values()), *MORE))
)
VIEWS = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")
# Metadata on which the number of nodes depends. Lists by layer are kept, too.
_STRUCTURE = (
    "block_count", "leading_dense_block_count", "full_attention_interval",
    "hyper_connection.sinkhorn_iterations", "expert_used_count", "expert_group_count",
    "expert_group_used_count", "attn_res.block_size",
)  # fmt: skip


@dataclass(frozen=True)
class Counted:
    """The kernels of one decode of a model, by operation."""

    architecture: str
    n_layers: int
    kernels: Mapping[str, int]

    @property
    def n_kernels(self) -> int:
        return sum(self.kernels.values())

    @property
    def per_layer(self) -> float:
        return self.n_kernels / self.n_layers


def structure(name: str) -> dict[str, Any]:
    """Return the metadata of the full model that decides the number of nodes."""
    preset = find_preset(name)
    full: dict[str, Any] = dict(preset.metadata)
    tiny: dict[str, Any] = dict(preset.tiny)
    n_layers = full["block_count"]
    kept = {key: full[key] for key in _STRUCTURE if key in full}
    for key, value in full.items():
        if isinstance(value, tuple) and len(value) == n_layers:
            kept[key] = value
            if key == "attention.head_count_kv":  # widths by layer: keep which are 0
                least = max(tiny[key]) if isinstance(tiny.get(key), tuple) else 1
                kept[key] = tuple(least if heads else 0 for heads in value)
    if "expert_used_count" in full:
        n_groups = int(kept.get("expert_group_count") or 1)
        least = max(int(tiny.get("expert_count", 0)), 2 * int(full["expert_used_count"]))
        kept["expert_count"] = -(-least // n_groups) * n_groups
    return kept


@contextmanager
def _graphs(found: list[Counter[str]]) -> Iterator[None]:
    """Append the kernels of each graph that the device computes to `found`."""
    before, directly = StreamingDevice.compute, StreamingDevice.compute_directly
    names = operations()

    def compute(self: StreamingDevice, stream: Any, graph: Any) -> int:
        table = NodeTable(graph)
        ops = (names[int(table.op[row])] for row in table.order if table.shape[row].all())
        found.append(Counter(op for op in ops if op not in VIEWS))
        return before(self, stream, graph)

    with (
        patch.object(StreamingDevice, "compute", compute),
        patch.object(
            StreamingDevice, "compute_directly", lambda self, *, on: directly(self, on=False)
        ),
    ):
        yield


def counted(name: str) -> Counted:
    """Write the model, decode one token, and count its kernels."""
    shape: Shape = resolve(name, "tiny", metadata=structure(name))
    options = engine_options(
        device="sim", stream_experts=False, min_batch=MinBatch(1, 1), n_ctx=512, n_ubatch=16,
        n_outputs=8, n_threads=1, n_threads_batch=1, flash_attn="on",
    )  # fmt: skip
    graphs: list[Counter[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_preset(name, Path(folder) / "m.gguf", seed=1, metadata=structure(name))
        with _graphs(graphs), open_engine(path, options) as engine:
            engine.sequences.extend(0, [1, 2, 3])
            graphs.clear()
            engine.sequences.extend(0, [4])
    kernels = sum(graphs, Counter[str]())
    n_layers = shape.number("block_count") - shape.number("nextn_predict_layers")
    return Counted(shape.architecture, n_layers, dict(sorted(kernels.items())))


def kept() -> dict[str, Counted]:
    """The committed record."""
    rows = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    return {name: Counted(**row) for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="count these presets alone")
    names: list[str] = parser.parse_args().names or list(NAMES)
    if wrong := set(names) - set(PRESETS):
        parser.error(f"unknown: {', '.join(sorted(wrong))}; known: {', '.join(PRESETS)}")
    found = kept()
    for name in names:
        # In a process of its own: the library ends the process at an impossible shape.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found[name] = its = pool.submit(counted, name).result()
        print(
            f"{name:22s} {its.architecture:12s} {its.n_layers:3d} layers, "
            f"{its.n_kernels:6d} kernels, {its.per_layer:6.1f} a layer",
            flush=True,
        )
    rows = {name: found[name].__dict__ for name in sorted(found)}
    RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
