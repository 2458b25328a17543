"""Measures what a change of the batch size costs a decode, in milliseconds of one thread.

Drafts change the size in almost every decode, and libllama builds the graph anew each time. The
model is small and random, with many layers. Decodes whose sizes are drawn from SIZES are compared
with decodes of one size again and again, after the same text. Each case is measured in turns, and
the difference is that of medians. `libllama` is llama.cpp alone. Its own cost is the least that any
case can have. If ggml finds a GPU, or the stand-in for one (scripts/on-cuda-standin), cases on it
are measured too. `python_calls`, `n_prepared` and `copies` are counts per decode of changing
sizes: C's calls of Python, prepared graphs, and copied weights. Prints one JSON object.

Usage: scripts/lab/run size-changes [--rounds N] [--layers N] [CASE...]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from lab.timing import decode_s
from offload.device import devices
from offload.engine import open_engine
from offload.ggml.library.callback import calls_into_python
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.schedule.splitter import stay
from offload.times.min_batch import NEVER, MinBatch

SIZES = (1, 2, 3, 5, 9)
N_TEXT = 16  # tokens before each batch
TOKEN = 7
N_WARM = 180  # decodes of changing sizes that are not timed: as many as in test_counters.py
N_CHANGING = 60  # decodes of changing sizes in a round
N_SAME = 12  # decodes of each size in a round, of which the first two are not timed
IN_PLACE = MinBatch(NEVER, NEVER)
STREAMED = MinBatch(1, 1)
ALL = Streaming(bounce=False)  # on `sim` and on the stand-in all experts get slots
HALF = Streaming(bounce=False, n_cpu_moe=999)  # half of the experts do
SPLIT = HALF | Streaming(hybrid=True, splitter=stay)  # the CPU computes the others

Times = dict[int, list[float]]  # seconds by batch size


def cases() -> dict[str, dict[str, Any]]:
    """Return the options of each case by its name."""
    found: dict[str, dict[str, Any]] = {
        "libllama": {"device": "cpu", "wrapped": False, "repack": False},
        "sim, experts in place": {"device": "sim", "min_batch": IN_PLACE},
        "sim, streamed": {"device": "sim", "min_batch": STREAMED},
        "sim, slots for half": {"device": "sim", "min_batch": STREAMED, "streaming": HALF},
        "sim, split": {"device": "sim", "min_batch": IN_PLACE, "streaming": SPLIT},
    }
    gpu = next((device.name for device in devices() if device.on_gpu), None)
    if gpu is not None:
        found |= {
            "GPU, libllama": {"device": gpu, "wrapped": False},
            "GPU, wrapped": {"device": gpu, "stream_experts": False, "min_batch": STREAMED},
            "GPU, experts in place": {"device": gpu, "min_batch": IN_PLACE},
            "GPU, streamed": {"device": gpu, "min_batch": STREAMED},
            "GPU, slots for half": {"device": gpu, "min_batch": STREAMED, "streaming": HALF},
            "GPU, split": {"device": gpu, "min_batch": IN_PLACE, "streaming": SPLIT},
        }
    return found


class Measured:
    """One case: an engine, and the times of its decodes."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        settings: dict[str, Any] = {
            "n_ctx": 256, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1,
            "streaming": ALL, "mla": False,
        }  # fmt: skip
        settings |= options
        if settings["streaming"] is not ALL:
            settings["streaming"] = _with_half(path, settings["streaming"])
        self.engine = open_engine(path, engine_options(**settings))
        self.engine.sequences.extend(
            0, [i % self.engine.n_vocab for i in range(N_TEXT)], n_logits=1
        )
        self.same: Times = {n: [] for n in SIZES}
        self.changing: Times = {n: [] for n in SIZES}
        self._n_decodes = self._n_calls = self._n_prepared = self._n_copies = 0

    def decode(self, n: int) -> float:
        """Return the seconds that a batch of `n` tokens takes."""
        sequences = self.engine.sequences
        sequences.rewind(0, N_TEXT)
        tokens = [TOKEN] * n  # one token, so that its experts stay in slots and nothing is copied
        return decode_s(sequences, tokens)

    def warm(self, sizes: Sequence[int]) -> None:
        for n in sizes:
            self.decode(n)

    def measure_same(self) -> None:
        for n in SIZES:
            self.same[n] += [self.decode(n) for _ in range(N_SAME)][2:]

    def measure_changing(self, sizes: Sequence[int]) -> None:
        before, calls = SIZES[-1], calls_into_python()
        prepared, copies = self._prepared(), self._copies()
        self.decode(before)
        for n in sizes:
            taken_s = self.decode(n)
            if n != before:
                self.changing[n].append(taken_s)
            before = n
        self._n_decodes += 1 + len(sizes)
        self._n_calls += calls_into_python() - calls
        self._n_prepared += self._prepared() - prepared
        self._n_copies += self._copies() - copies

    def _copies(self) -> int:
        return self.engine.counters().copies

    def _prepared(self) -> int:
        return sum(device.n_prepared for device in self.engine.opened.devices)

    def result(self) -> dict[str, Any]:
        same, changing = (
            {n: 1e3 * float(np.median(times)) for n, times in of.items()}
            for of in (self.same, self.changing)
        )
        added = [changing[n] - same[n] for n in SIZES]
        return {
            "added_ms": round(float(np.mean(added)), 2),
            "added_ms_by_size": {n: round(ms, 2) for n, ms in zip(SIZES, added, strict=True)},
            "same_ms_by_size": {n: round(ms, 2) for n, ms in same.items()},
            "python_calls": round(self._n_calls / self._n_decodes, 1),
            "n_prepared": round(self._n_prepared / self._n_decodes, 3),
            "copies": round(self._n_copies / self._n_decodes, 2),
        }


def _with_half(path: Path, streaming: Streaming) -> Streaming:
    """Return the options with slots for half of the experts."""
    plan = make_plan(read_facts(path), PlanRequest(n_cpu_moe=streaming.get("n_cpu_moe")))
    return streaming | Streaming(vram_bytes=plan.resident_bytes + plan.slot_bytes // 2)


def measure(path: Path, names: Sequence[str], n_rounds: int) -> dict[str, Any]:
    """Measure the cases in turns, round by round."""
    options = cases()
    found = {name: Measured(path, options[name]) for name in names}
    try:
        drawn = _drawn(n_rounds)
        for nth, sizes in enumerate(drawn):
            for case in found.values():
                if nth == 0:
                    case.warm(_sizes(N_WARM, seed=8))
                case.measure_same()
                case.measure_changing(sizes)
        return {name: case.result() for name, case in found.items()}
    finally:
        for case in found.values():
            case.engine.close()


def _drawn(n_rounds: int) -> Iterator[list[int]]:
    for nth in range(n_rounds):
        yield _sizes(N_CHANGING, seed=100 + nth)


def _sizes(n: int, seed: int) -> list[int]:
    """Return the sizes of `n` decodes."""
    drawn: list[int] = np.random.default_rng(seed).choice(SIZES, n).tolist()
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    asked = parser.parse_args()
    wrong = [name for name in asked.cases if name not in cases()]
    if wrong:
        parser.error(f"no case {wrong[0]!r}; there are: {'; '.join(cases())}")
    with tempfile.TemporaryDirectory() as folder:
        path = write_preset(
            "qwen3moe", Path(folder) / "model.gguf", n_layer=asked.layers, n_expert=64, seed=1
        )
        found = measure(path, asked.cases or [*cases()], asked.rounds)
    print(json.dumps({"layers": asked.layers, "sizes": SIZES, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
