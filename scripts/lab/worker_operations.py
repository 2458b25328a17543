"""Records which operations the graphs of our clients contain, with parameters and integer sources.

A worker computes these operations alone (offload/worker/op_rules.py). Each architecture of
docs/models.md, and some dense ones, decodes on `sim` with flash attention on and off, with one
sequence and with several. The result is `worker_operations.json`, which a test compares with the
rules.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab import ROOT
from lab.synth import write_preset
from lab.synth.mixtures import ARCHITECTURES, write_mixture
from offload.engine import Engine, EngineOptions
from offload.errors import OffloadError
from offload.ggml.node_table import NodeTable, is_packed, operations, type_name
from offload.ggml.tensor import type_number
from offload.plan.min_batch import MinBatch
from offload.streaming.device import StreamingDevice

RECORD = ROOT / "scripts" / "lab" / "worker_operations.json"
DENSE = (
    "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "command-r7b", "gemma-2-2b", "gemma-3n-e4b",
)  # fmt: skip
BATCHES = (1, 2, 5, 64, 3, 1)
Way = tuple[str, int, str]
WAYS: tuple[Way, ...] = (  # flash attention, sequences, type of the cache
    ("on", 1, "q8_0"), ("off", 1, "f16"), ("on", 3, "f16"),
)  # fmt: skip
_VIEWS = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")


@dataclass
class Operation:
    """The parameters and sources that graphs give one operation."""

    params: dict[int, tuple[int, int]] = field(default_factory=dict)  # least and largest, not all 0
    integers: dict[int, set[str]] = field(default_factory=dict)  # source -> what computed it
    strided: set[int] = field(default_factory=set)  # sources with gaps, or turned; -1: the result
    types: set[str] = field(default_factory=set)  # result's type, then those of the sources

    def add(self, other: Operation) -> None:
        for index, (least, most) in other.params.items():
            a, b = self.params.get(index, (0, 0))
            self.params[index] = min(a, least), max(b, most)
        for source, kinds in other.integers.items():
            self.integers.setdefault(source, set()).update(kinds)
        self.strided |= other.strided
        self.types |= other.types


Operations = dict[str, Operation]


def read(table: NodeTable, found: Operations) -> None:
    """Add the operations of a graph to `found`."""
    names = operations()
    integers = [type_number("i32"), type_number("i64")]
    packed = is_packed(table)
    for row in table.order.tolist():
        op = names[int(table.op[row])]
        if op in _VIEWS:
            continue
        its = found.setdefault(op, Operation())
        if not table.shape[row].all():
            continue  # no kernel runs for an empty result
        one = Operation()
        for index, value in enumerate(table.params[row].tolist()):
            if value:
                one.params[index] = value, value
        if not packed[row]:
            one.strided.add(-1)
        for index, source in enumerate(table.sources[row].tolist()):
            if source >= 0 and not packed[source]:
                one.strided.add(index)
            if source >= 0 and int(table.type[source]) in integers:
                root = int(table.root[source]) if table.is_view[source] else source
                made = names[int(table.op[root])]
                one.integers[index] = {"input" if made == "NONE" else made}
        sources = [int(s) for s in table.sources[row] if s >= 0]
        one.types.add(" ".join(type_name(int(table.type[s])) for s in (row, *sources)))
        its.add(one)


@contextmanager
def reading(found: Operations) -> Iterator[None]:
    """Add the operations of all graphs that a wrapped device computes to `found`."""
    before = StreamingDevice.compute

    def compute(self: StreamingDevice, stream: Any, graph: Any) -> int:
        read(NodeTable(graph), found)
        return before(self, stream, graph)

    directly = StreamingDevice.compute_directly

    def never(self: StreamingDevice, *, on: bool) -> None:
        directly(self, on=False)

    with (
        patch.object(StreamingDevice, "compute", compute),
        patch.object(
            StreamingDevice, "compute_directly", lambda self, *, on: directly(self, on=False)
        ),
    ):
        yield


def _options(flash_attn: str, n_sequences: int, cache: str) -> EngineOptions:
    return EngineOptions(
        device="sim", stream_experts=False, min_batch=MinBatch(1, 1), n_ctx=512, n_ubatch=64,
        n_outputs=128, n_threads=1, n_threads_batch=1, flash_attn=flash_attn,
        n_sequences=n_sequences, type_k=cache, type_v=cache if flash_attn == "on" else "f16",
    )  # fmt: skip


def operations_of(path: Path, way: Way) -> Operations:
    """Decode batches of several sizes, and return the operations of their graphs."""
    found: Operations = {}
    with reading(found):
        try:
            _decode(path, *way)
        except OffloadError as e:
            print(f"  {path.stem} {way}: {e}", flush=True)
    return found


def _decode(path: Path, flash_attn: str, n_sequences: int, cache: str) -> None:
    with Engine(path, _options(flash_attn, n_sequences, cache)) as engine:
        its = engine.sequences
        for n in BATCHES:
            tokens = [(13 * i + 5 * n) % engine.n_vocab for i in range(n)]
            if n_sequences == 1:
                its.extend(0, tokens)
            else:
                its.extend_batch([(s, tokens, 1) for s in range(n_sequences)])


def written(name: str, path: Path) -> Path:
    """Write the tiny model of an architecture, or of a dense preset."""
    if name in ARCHITECTURES:
        return write_mixture(name, path)
    return write_preset(name, path, size="tiny", seed=1)


def tried(name: str, way: Way) -> Operations:
    with tempfile.TemporaryDirectory() as folder:
        return operations_of(written(name, Path(folder) / f"{name}.gguf"), way)


def _tried_apart(name: str, way: Way) -> Operations:
    """Try in a process of its own, because the library ends the process at an impossible shape."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(tried, name, way).result()
        except BrokenProcessPool:
            print(f"  {name} {way}: the library ended the process", flush=True)
            return {}


def as_json(found: Mapping[str, Operation]) -> dict[str, Any]:
    return {
        op: {
            "params": {str(i): list(one.params[i]) for i in sorted(one.params)},
            "integers": {str(i): sorted(one.integers[i]) for i in sorted(one.integers)},
            "strided": sorted(one.strided),
            "types": sorted(one.types),
        }
        for op, one in sorted(found.items())
    }


def main(names: Sequence[str] = (*ARCHITECTURES, *DENSE)) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found: Operations = {}
    for name in names:
        for way in WAYS:
            for op, its in _tried_apart(name, way).items():
                found.setdefault(op, Operation()).add(its)
        print(name, len(found), flush=True)
    RECORD.write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
