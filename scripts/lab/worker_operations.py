"""Records which operations the graphs of our clients contain, with parameters and integer sources.

    scripts/lab/run worker-operations                 record all again
    scripts/lab/run worker-operations "mtp mimo2"     add these to the record

A worker computes these operations alone (offload/worker/op_rules.py). Each architecture of
docs/models.md, some dense ones and one with groups of experts decode on `sim` with flash attention
on and off, with one sequence and with several. The layers of a model that draft (`mtp NAME`),
EAGLE-3 files (`eagle NAME`) and block drafts (`block VARIANT`) draft after each decode. Our clients
never shift a context: an answer ends where it is full. The result is `worker_operations.json`,
which tests compare with the rules, and with the graphs of the present library.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab import ROOT
from lab.options import engine_options
from lab.synth import block, eagle, mtp, write_preset
from lab.synth.mixtures import ARCHITECTURES, write_mixture
from offload.engine import EngineOptions, open_engine
from offload.errors import BadModel, OffloadError
from offload.ggml.node_table import NodeTable, is_packed, operations, type_name
from offload.ggml.tensor import type_number
from offload.model_file import read_facts
from offload.sequences.row_draft import RowDraft
from offload.stream.device import StreamingDevice
from offload.times.min_batch import MinBatch

RECORD = ROOT / "scripts" / "lab" / "worker_operations.json"
DENSE = (
    "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "command-r7b", "gemma-2-2b", "gemma-3n-e4b",
)  # fmt: skip
GROUPED = ("deepseek-v3",)  # whose routers choose groups of experts first
_STREAMS = "dspark-conf of deepseek4"  # with hyper-connections, like its target
DRAFTING = (
    *(f"mtp {name}" for name in mtp.ARCHITECTURES),
    *(f"eagle {name}" for name in eagle.TARGETS),
    *(f"block {variant}" for variant in (*block.VARIANTS, _STREAMS)),
)
NAMES = (*ARCHITECTURES, *DENSE, *GROUPED, *DRAFTING)
BATCHES = (1, 2, 5, 64, 3, 1)
_N_DRAFTED = 3
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
    return engine_options(
        device="sim", stream_experts=False, min_batch=MinBatch(1, 1), n_ctx=512, n_ubatch=64,
        n_outputs=128, n_threads=1, n_threads_batch=1, flash_attn=flash_attn,
        n_sequences=n_sequences, type_k=cache, type_v=cache if flash_attn == "on" else "f16",
    )  # fmt: skip


def operations_of(path: Path, way: Way, options: EngineOptions | None = None) -> Operations:
    """Decode batches of several sizes, and return the operations of their graphs.

    `options` replaces those of `way`, to draft after each decode.
    """
    found: Operations = {}
    with reading(found):
        try:
            _decode(path, options or _options(*way))
        except OffloadError as e:
            print(f"  {path.stem} {way}: {e}", flush=True)
    return found


def _decode(path: Path, options: EngineOptions) -> None:
    with open_engine(path, options) as engine:
        if (options.wanted.mtp or options.row_file) and engine.opened.row_draft is None:
            raise BadModel(engine.opened.no_rows_reason)
        texts: list[list[int]] = [[] for _ in range(options.wanted.context.n_sequences)]
        for n in BATCHES:
            tokens = [(13 * i + 5 * n) % min(engine.n_vocab, eagle.N_MAPPED) for i in range(n)]
            if len(texts) == 1:
                engine.sequences.extend(0, tokens)
            else:
                engine.sequences.extend_batch([(s, tokens, 1) for s in range(len(texts))])
            for text in texts:
                text += tokens
            if engine.opened.row_draft is not None:
                _draft(engine.opened.row_draft, texts)


def _draft(layers: RowDraft, texts: Sequence[Sequence[int]]) -> None:
    feeds = [layers.tail(s, [*text, 7]) for s, text in enumerate(texts)]
    for _ in range(min(_N_DRAFTED, layers.most_drafted or _N_DRAFTED)):
        layers.extend_batch([(s, feed, 1) for s, feed in enumerate(feeds)])
        feeds = [[9] for _ in texts]
    for s, text in enumerate(texts):
        layers.rewind(s, len(text))


def written(name: str, path: Path) -> Path:
    """Write the tiny model of an architecture, or of a preset."""
    if name in ARCHITECTURES:
        return write_mixture(name, path)
    return write_preset(name, path, size="tiny", seed=1)


def tried(name: str, way: Way) -> Operations:
    """Return the operations of one of `NAMES`."""
    options = _options(*way)
    kind, _, of = name.partition(" ") if name in DRAFTING else ("", "", name)
    with tempfile.TemporaryDirectory() as its:
        folder = Path(its)
        if kind == "mtp":
            return operations_of(mtp.write_mtp(folder, of), way, engine_options(options, mtp=True))
        if kind == "eagle":
            target = eagle.write_target(folder, of)
            files = [
                eagle.write_eagle(folder, target, mapped=own, own_embeddings=own)
                for own in (False, True)
            ]
            found = [
                operations_of(target, way, engine_options(options, row_file=file)) for file in files
            ]
            return together(found)
        if kind == "block":
            target, files = _blocks(folder, of)
            return together(
                operations_of(target, way, engine_options(options, row_file=file)) for file in files
            )
        return operations_of(written(name, folder / f"{name}.gguf"), way)


def _blocks(folder: Path, of: str) -> tuple[Path, list[Path]]:
    """A target and its block drafts of a variant. One of Qwen3-MoE's two has a map of tokens."""
    if of == _STREAMS:
        target = write_preset("deepseek-v4-flash", folder / "target.gguf", quant="f32")
        layers = tuple(range(read_facts(target).n_layers))
        return target, [
            block.write_block(folder, target, "dspark-conf", streams=True, target_layers=layers)
        ]
    target = eagle.write_target(folder, "qwen3moe")
    return target, [
        block.write_block(folder, target, of, mapped=mapped) for mapped in (False, True)
    ]


def together(found: Iterable[Operations]) -> Operations:
    all_: Operations = {}
    for one in found:
        for op, its in one.items():
            all_.setdefault(op, Operation()).add(its)
    return all_


def tried_apart(name: str, way: Way) -> Operations:
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


def from_json(record: Mapping[str, Any]) -> Operations:
    return {
        op: Operation(
            {int(i): (least, most) for i, (least, most) in its["params"].items()},
            {int(i): set(kinds) for i, kinds in its["integers"].items()},
            set(its["strided"]),
            set(its["types"]),
        )
        for op, its in record.items()
    }


def kept() -> Operations:
    """The committed record."""
    return from_json(json.loads(RECORD.read_text("utf-8")))


def recorded(names: Sequence[str] = NAMES) -> Operations:
    """Return the operations of the graphs of these names, each tried in all ways."""
    found: Operations = {}
    for name in names:
        found = together([found, *(tried_apart(name, way) for way in WAYS)])
        print(name, len(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="add these to the record")
    names: list[str] = parser.parse_args().names
    if wrong := set(names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(wrong))}; known: {', '.join(NAMES)}")
    found = together([kept(), recorded(names)]) if names else recorded()
    RECORD.write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
