"""Compares streamed and split layers with the resident model, while layers are computed ahead.

Half of the experts have slots, so most decodes lack some, and the device has to compute layers
again. Batches have 1, 4, 9 and 16 tokens, since kernels differ with the number of tokens. The
resident model on the device is also compared with the CPU. Rounding cannot change which experts the
model's routers choose, so one wrong row or one wrong expert breaks the limit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from decisive import write_decisive
from logits import STRICT, divergences, judged
from numpy.typing import NDArray
from setting import Setting
from timed_parts import LeftOut

from lab.options import Streaming, engine_options
from offload.backends import CUDA
from offload.engine import open_engine
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.schedule.splitter import stay
from offload.stream import play
from offload.times.min_batch import NEVER, MinBatch

SIZES = (1, 4, 9, 16)  # tokens of a batch
QUANTS = ("q4_K", "q3_K")
_COUNTED = ("misses", "n_pairs_host", "n_repairs", "layers_rung")
_WITHOUT_WAIT = "doorbell"
N_TEXTS, N_TEXTS_CHECKED = 6, 2  # per batch size; under compute-sanitizer, which is slow
_SANITIZER = "compute-sanitizer"
_FOUND = 86  # exit status that tells its findings from failures of the program

Logits = NDArray[np.float32]


def measure(setting: Setting) -> bool:
    """Fill `equality` of the report with a row per type, way and batch size. True if all agree."""
    rows: list[dict[str, Any]] = setting.report["equality"]
    for quant in QUANTS:
        path = setting.folder / f"equality-{quant}.gguf"
        if not path.exists():
            write_decisive(path, quant)
        rows += [{"type": quant, **row} for row in rows_of(setting, path, path)]
        setting.save()
    setting.show("equal to the resident model; kl = divergence of a row in nats", rows)
    return all(row["passed"] for row in rows)


def rows_of(setting: Setting, path: Path, streamed: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of one type of experts. `streamed` is the file that is streamed and split:
    the same as `path`, except in a test."""
    n_texts = N_TEXTS_CHECKED if setting.args.inside else N_TEXTS
    resident = {"streaming": Streaming(), "stream_experts": False, "wrapped": False}
    expected, _ = _computed(setting, path, n_texts, resident)
    ways: dict[str, tuple[Path, dict[str, Any]]] = {
        "streamed": (streamed, {"streaming": half(path), "min_batch": MinBatch(1, 1)}),
        "split": (streamed, {
            "streaming": half(path, hybrid=True, splitter=stay, doorbell=False),
            "min_batch": MinBatch(NEVER, NEVER),
        }),
        _WITHOUT_WAIT: (streamed, {
            "streaming": half(path, hybrid=True, splitter=stay),
            "min_batch": MinBatch(NEVER, NEVER),
        }),
        "CPU": (path, {**resident, "device": "cpu"}),
    }  # fmt: skip
    for way, (file, options) in ways.items():
        with patch.object(play.Waits, "choose", lambda _, n_layers: n_layers):
            got, counted = _computed(setting, file, n_texts, options)
        for n in SIZES:
            row = {"way": way, "n": n, **judged(divergences(got[n], expected[n]), STRICT)}
            yield (
                row | counted[n] | {"passed": row["same"] and _was_ahead(setting, way, counted[n])}
            )


def _was_ahead(setting: Setting, way: str, counted: dict[str, int]) -> bool:
    """True if layers were computed before their experts were known, as the way asks."""
    if way == _WITHOUT_WAIT and setting.choice.device.backend is CUDA:
        return counted["layers_rung"] > 0
    return way == "CPU" or counted["n_repairs"] > 0


def half(path: Path, **changes: Any) -> Streaming:
    """Streaming with slots for half of the experts, and for none of them a layer of its own."""
    plan = make_plan(read_facts(path), PlanRequest(n_cpu_moe=999))
    vram_bytes = plan.resident_bytes + plan.slot_bytes // 2
    return Streaming(vram_bytes=vram_bytes, n_cpu_moe=999, **changes)


def _computed(
    setting: Setting, path: Path, n_texts: int, changes: dict[str, Any]
) -> tuple[dict[int, Logits], dict[int, dict[str, int]]]:
    """Returns logits [n_texts * n, n_vocab] and counts of the decodes, by batch size n."""
    settings: dict[str, Any] = {
        "device": setting.choice.name, "n_ctx": 128, "n_ubatch": 32, "n_outputs": 32,
        "n_threads": 1, "n_threads_batch": 1, "repack": False, "mla": False,
        "flash_attn": "off" if setting.args.small else "auto",
    }  # fmt: skip
    rows: dict[int, list[Logits]] = {n: [] for n in SIZES}
    counted = {n: dict.fromkeys(_COUNTED, 0) for n in SIZES}
    with open_engine(path, engine_options(**{**settings, **changes})) as engine:
        for text in range(n_texts):
            for n in SIZES:
                before = engine.counters()
                engine.sequences.rewind(0, 0)
                tokens = [(37 * k + 11 * n + 5 * text) % engine.n_vocab for k in range(n)]
                rows[n].append(engine.sequences.extend(0, tokens))
                after = engine.counters()
                for name in _COUNTED:
                    counted[n][name] += getattr(after, name) - getattr(before, name)
    return {n: np.concatenate(of) for n, of in rows.items()}, counted


def sanitized(setting: Setting) -> bool:
    """Run the comparison under compute-sanitizer, with fewer texts. True if it found nothing.

    Fills `sanitizer` of the report. Raises LeftOut if the tool is missing or refuses the device.
    """
    tool = shutil.which(_SANITIZER)
    if tool is None:
        raise LeftOut(f"{_SANITIZER} is not on the PATH")
    found = setting.report["sanitizer"]
    program = [sys.executable, str(Path(__file__).parent), "equality", "--inside",
               "--device", setting.args.device, "--model-dir", str(setting.folder),
               *(["--dry-run-sim"] if setting.args.dry_run_sim else []),
               *(["--small"] if setting.args.small else [])]  # fmt: skip
    options = ["--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no",
               "--error-exitcode", str(_FOUND), "--print-limit", "20"]  # fmt: skip
    lines: list[str] = []
    with subprocess.Popen([tool, *options, *program], stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.STDOUT) as run:  # fmt: skip
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            if line.startswith("===="):
                lines.append(line.rstrip())
    summary = next((line for line in reversed(lines) if "ERROR SUMMARY" in line), "")
    found |= {"status": run.returncode, "summary": summary, "lines": lines[:200]}
    if re.search(r"[Dd]evice not supported", "\n".join(lines)):
        raise LeftOut(f"{_SANITIZER} does not support this device")
    if not summary:
        raise LeftOut(f"{_SANITIZER} ended with status {run.returncode} and no summary")
    return run.returncode == 0
