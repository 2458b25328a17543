"""A session whose layers are split, of which a part fails while a file says which: for a real
engine process, which opens it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import Stream
from offload.ggml.graph import Graph
from offload.model_file import read_facts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import make_plan
from offload.split.cpu_side import HostGraph
from offload.split.division import HIT, HOST, STREAMED
from offload.streaming.copying import ThreadCopier, Transfer
from specoffload.config.environment import Environment, read_host
from specoffload.config.options import Options, Toggle
from specoffload.config.resolution import demo_file, resolve
from specoffload.config.speculation import NO_DRAFTS
from specoffload.session.progress import OnProgress, ignore
from specoffload.session.session import Session

FAULTS = ("cpu", "device", "copy")


def by_turns(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """A splitter that copies half of the misses, and leaves the others to the CPU."""
    odd = np.arange(len(resident)) % 2 == 1
    return np.where(resident, HIT, np.where(odd, STREAMED, HOST)).astype(np.uint8)


class _Failing(Stream):
    def __init__(self) -> None:
        """Opens nothing."""

    def compute(self, graph: Graph) -> int:
        return -1


@dataclass(frozen=True)
class FaultyFactory:
    """Picklable. `fault` is a file with one of FAULTS, or empty."""

    fault: Path

    def __call__(self, on_progress: OnProgress = ignore) -> Session:
        whole = make_plan(read_facts(demo_file("target.gguf")))
        options = Options(
            device="sim",
            threads=1,
            ctx_size=512,
            vram_bytes=whole.resident_bytes + whole.slot_bytes // 2,
            n_cpu_moe=99,
            min_batch=MinBatch(1000, 1000),
            hybrid=Toggle.ON,
            use_profile=False,
            spec=NO_DRAFTS,
        )
        config = resolve(options, read_host(Environment()))
        session = Session(replace(config, parallel=2), on_progress)
        assert session.target.hybrid is not None
        session.target.hybrid.switch.splitter = by_turns
        self._watch()
        return session

    def _watch(self) -> None:
        by_cpu, by_device, copy = HostGraph.compute, Stream.compute, ThreadCopier._copy

        def fails(what: str) -> bool:
            return self.fault.read_text(encoding="utf-8") == what

        def on_cpu(self: HostGraph, stream: Stream, layer: int) -> int:
            return by_cpu(self, _Failing() if fails("cpu") else stream, layer)

        def on_device(self: Stream, graph: Graph) -> int:
            return -1 if fails("device") else by_device(self, graph)

        def copied(self: ThreadCopier, transfer: Transfer) -> None:
            if fails("copy"):
                raise OSError("the link is down")
            copy(self, transfer)

        HostGraph.compute = on_cpu  # type: ignore[method-assign]
        Stream.compute = on_device  # type: ignore[method-assign]
        ThreadCopier._copy = copied  # type: ignore[method-assign]
