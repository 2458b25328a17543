"""Tries every mixture of experts that the library knows, and makes docs/models.md's table of them.

Each architecture is written as a tiny random model (`lab.synth.mixtures`) and computed in seven
ways: by the CPU alone, with all experts in slots, streamed, split, in passes, in passes with a part
for the CPU, and over two devices. All must give the same bits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.options import Streaming, engine_options
from lab.synth.mixtures import (
    ARCHITECTURES,
    MODELS,
    REFUSED,
    RELEASE,
    architectures_of,
    mtp_architectures_of,
    write_mixture,
)
from lab.tables import filled, page_of
from offload.engine import EngineOptions, open_engine
from offload.errors import OffloadError
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.row_draft import MTP_ARCHITECTURES
from offload.schedule.division import SplitCosts
from offload.schedule.splitter import ByCosts, Splitter
from offload.times.min_batch import NEVER, MinBatch

ON_GPU = 999  # for `n_gpu_layers`: the dense weights of all layers stay resident
PAGE = page_of("architectures")
BATCHES = (1, 2, 5, 1, 17, 64, 3, 1, 200)
Rows = NDArray[np.float32]


def halves() -> Splitter:
    """Gives about half of the missing experts to the CPU: it takes as long for one as a copy."""
    second = np.array([0.0, 1.0, 1.0])
    return ByCosts(SplitCosts(second, 0.1 * second, 0.0, 0.0, 1.0))


def ways(path: Path) -> Mapping[str, EngineOptions]:
    """The ways to compute a model.

    Slots have room for half of the experts where they stream. In passes they have room for those of
    two tokens.
    """
    whole = make_plan(read_facts(path), PlanRequest())
    streaming = Streaming(vram_bytes=whole.resident_bytes + whole.slot_bytes // 2)
    few_bytes = sum(2 * pool.n_used * pool.slot_bytes for pool in whole.layout.pools)
    few = Streaming(vram_bytes=whole.resident_bytes + few_bytes, n_gpu_layers=ON_GPU, passes="on")
    common = engine_options(
        device="sim", min_batch=MinBatch(1, 1), n_ctx=512, n_ubatch=128, n_outputs=256,
        n_threads=1, n_threads_batch=1,
    )  # fmt: skip
    never = MinBatch(NEVER, NEVER)
    return {
        "alone": engine_options(common, device="cpu", stream_experts=False),
        "resident": engine_options(common, stream_experts=False),
        "streamed": engine_options(common, streaming=streaming),
        "split": engine_options(
            common, min_batch=never, streaming=streaming | Streaming(hybrid=True, splitter=halves())
        ),
        "passes": engine_options(common, streaming=few),
        "shared passes": engine_options(
            common, min_batch=never, streaming=few | Streaming(hybrid=True, splitter=halves())
        ),
        "two devices": engine_options(common, device="sim,sim", tensor_split=(1, 1)),
    }


def computed(path: Path, way: str, options: EngineOptions) -> tuple[Rows, bool]:
    """Logits after batches of all sizes, and whether experts were computed in this way."""
    with open_engine(path, options) as engine:
        rows = [
            engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
            for n in BATCHES
        ]
        counters = engine.counters()
    used = {
        "streamed": counters.streamed_experts > 0,
        "split": counters.split_layers > 0,
        "passes": counters.passes > 0,
        "shared passes": counters.passes > 0 and counters.n_pairs_host > 0,
        "two devices": counters.streamed_experts > 0,
    }
    return np.concatenate(rows), used.get(way, True)


def results(path: Path) -> Iterator[tuple[str, str]]:
    """(way, "same bits" or what differs) for each way of computing a model."""
    expected: Rows | None = None
    for way, options in ways(path).items():
        try:
            rows, used = computed(path, way, options)
        except OffloadError as e:
            yield way, f"refused: {e}"
            continue
        if expected is None:
            expected = rows
        if not np.isfinite(rows).all():
            yield way, "not a number"
        elif not np.ptp(rows, axis=1).all():
            yield way, "all tokens are equally likely"
        elif not np.array_equal(rows, expected):
            yield way, f"differs by {np.abs(rows - expected).max():.2g}"
        elif not used:
            yield way, "same bits, but no expert was computed in this way"
        else:
            yield way, "same bits"


def tried(architecture: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = write_mixture(architecture, Path(folder) / f"{architecture}.gguf")
        return {**dict(results(path)), "checkpoints": checkpoints_of(path)}


def checkpoints_of(path: Path) -> str:
    """Whether rejected drafts are undone with snapshots, as recurrent layers need them."""
    return "yes" if read_facts(path).recurrent_layers else "not needed"


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """The page's table of what `tried` found. The last columns say what tests check."""
    names = ["resident", "streamed", "split", "passes", "shared passes", "two devices"]
    held = ["speculation", "MTP", "checkpoints", "memory"]
    heads = ["architecture", "models", *names, *held]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for architecture in sorted([*MODELS, *REFUSED]):
        if architecture in REFUSED:
            lines.append(
                f"| `{architecture}` | | {REFUSED[architecture]} |{' |' * (len(heads) - 3)}"
            )
            continue
        cells = ["yes" if found[architecture][n] == "same bits" else found[architecture][n]
                 for n in names]  # fmt: skip
        cells += [
            "yes",
            "yes" if architecture in MTP_ARCHITECTURES else "none",
            found[architecture]["checkpoints"],
            "yes",
        ]
        lines.append(f"| `{architecture}` | {MODELS[architecture]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="llama.cpp's folder src: compare the names")
    given = parser.parse_args()
    if given.source is not None:
        known, listed = set(architectures_of(given.source)), {*MODELS, *REFUSED}
        print("not listed:", *sorted(known - listed) or ["none"])
        print("no mixtures any more:", *sorted(listed - known) or ["none"])
        drafting = set(mtp_architectures_of(given.source))
        print("MTP not listed:", *sorted(drafting - MTP_ARCHITECTURES) or ["none"])
        print("no MTP any more:", *sorted(MTP_ARCHITECTURES - drafting) or ["none"])
        return
    # A process for each, because the library ends the process where it meets an impossible shape.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        found = {}
        for architecture, ways_of in zip(
            ARCHITECTURES, pool.map(tried, ARCHITECTURES), strict=True
        ):
            found[architecture] = ways_of
            print(architecture, ways_of, flush=True)
    text = f"As of the library of llama-cpp-python {RELEASE}:\n\n{table(found)}"
    PAGE.write_text(filled(PAGE, {"mixtures": text}), encoding="utf-8")


if __name__ == "__main__":
    main()
