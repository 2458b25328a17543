"""`scripts/gpu-check draft`: the draft in torch against libllama's, tables and one JSON object.

Equality on tiny models of every architecture first, then tokens per second on a file of
Qwen2.5-0.5B's shape with random weights, for drafts of several lengths, beside what the device's
bandwidth would allow.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from offload.device import choose_device, devices
from offload.errors import DeviceUnavailable
from offload.synth import write_preset
from offload.torch_draft.devices import check_device, torch_name
from offload.torch_draft.layout import DTYPES
from offload.torch_draft.options import TorchDraftOptions
from specoffload.commands.bench import commit, machine

out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)

AIM_VS_LLAMA, AIM_SHARE, AIM_K = 2.0, 0.5, 8


@dataclass
class Report:
    """What the last line says."""

    device: str
    machine: dict[str, Any]
    commit: str | None
    dry_run: bool
    equality: list[dict[str, Any]] = field(default_factory=list)
    bandwidth_bytes_per_s: float = 0.0
    speeds: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    aims: dict[str, bool] = field(default_factory=dict)
    error: str = ""
    ok: bool = False


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check draft", description=__doc__)
    parser.add_argument("--device", default="auto", help="a name ggml knows, or cpu")
    parser.add_argument("--k", default="1,4,8,16", help="tokens per draft")
    parser.add_argument("--depth", type=int, default=512, help="tokens held before")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--quant", default="q8_0", help="of the file")
    parser.add_argument("--type", default="bf16", choices=DTYPES,
                        help="of the torch draft's matrices")  # fmt: skip
    parser.add_argument("--kept", type=int, default=32768, help="of the pruned vocabulary")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model-dir", type=Path, help="where the model is written and kept")
    parser.add_argument("--dry-run-sim", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args(words)
    if args.dry_run_sim:
        args.device, args.k, args.depth, args.repetitions, args.kept = "cpu", "1,4", 32, 3, 128
    return args


def main(words: list[str]) -> int:
    args = arguments(words)
    choice = choose_device(args.device)
    if not choice.on_gpu and args.device != "cpu":
        names = ", ".join(device.name for device in devices())
        out.print(f"no GPU here (ggml knows {names}): run this where one is, or with --dry-run-sim "
                  "or --device cpu", soft_wrap=True)  # fmt: skip
        return 2
    try:
        where = torch_name(choice.name, on_gpu=choice.on_gpu)
        check_device(where)
    except DeviceUnavailable as e:
        out.print(str(e), soft_wrap=True)
        return 2
    report = Report(choice.name, machine(), commit(), args.dry_run_sim)
    out.print(f"{choice.name}: {choice.description}, torch on {where}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model_dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            measure(args, choice.name, where, folder, report)
        except Exception as e:  # what was measured before is still worth its line
            report.error = f"{type(e).__name__}: {e}"
            traceback.print_exc()
    out.print(json.dumps(asdict(report)), soft_wrap=True, markup=False)
    return 0 if report.ok else 1


def measure(
    args: argparse.Namespace, ggml_device: str, where: str, folder: Path, report: Report
) -> None:
    from draft_equality import equality_of
    from draft_speed import Job, bandwidth, by_llama, by_torch, rows_of, variants

    report.equality = [asdict(row) for row in equality_of(where, folder)]
    show_equality(report.equality)
    k = tuple(int(n) for n in args.k.split(","))
    job = Job(model(args, folder), ggml_device, where, k, args.depth, args.repetitions,
              args.threads)  # fmt: skip
    plain = TorchDraftOptions(where, job.n_ctx, dtype=args.type, n_threads=args.threads)
    report.bandwidth_bytes_per_s = bandwidth(where)
    out.print(f"bandwidth of {where}: {report.bandwidth_bytes_per_s / 1e9:.1f} GB/s")
    llama = by_llama(job)
    speeds = [llama]
    for name, chosen in variants(plain, args.kept).items():
        speeds.append(by_torch(job, name, chosen))
    report.speeds = [asdict(speed) for speed in speeds]
    report.rows = rows_of(llama, speeds, k, report.bandwidth_bytes_per_s)
    show_speeds(report)
    report.aims = aims(report.rows, speeds[1].planned_bytes, speeds[1].taken_bytes,
                       speeds[1].left_bytes)  # fmt: skip
    report.ok = all(row["passed"] for row in report.equality)
    for words, met in report.aims.items():
        out.print(f"{'met' if met else 'MISSED'}: {words}")


def model(args: argparse.Namespace, folder: Path) -> Path:
    """Qwen2.5-0.5B's shape, written if it is not there."""
    size = "tiny" if args.dry_run_sim else "full"
    path = folder / f"draft-{size}-{args.quant}.gguf"
    if not path.exists():
        out.print(f"writing {path.name}")
        write_preset("qwen2.5-0.5b", path, size=size, quant=args.quant, seed=7)
    return path


def aims(rows: list[dict[str, Any]], planned: int, taken: int, left: int) -> dict[str, bool]:
    """What was hoped for; a miss is a number to report, not a failure."""
    found = {}
    at = [row for row in rows if row["k"] == AIM_K and row["engine"] == "torch"]
    for row in at:
        found[f"at least {AIM_VS_LLAMA:g} x libllama at k = {AIM_K}"] = (
            row["vs_llama"] >= AIM_VS_LLAMA
        )
        found[f"at least {AIM_SHARE:.0%} of the ceiling at k = {AIM_K}"] = (
            row["share_of_ceiling"] >= AIM_SHARE
        )
    if taken:
        found["no more memory than planned"] = taken <= planned
        found["all memory given back on close"] = left == 0
    return found


def show_equality(rows: list[dict[str, Any]]) -> None:
    table = Table("equality", "model", "worst difference of p", "allowed", "other tokens", "",
                  title_justify="left")  # fmt: skip
    for row in rows:
        table.add_row(row["what"], row["model"], f"{row['worst']:.2e}", f"{row['allowed']:.0e}",
                      f"{row['n_other']} of {row['n_tokens']} ({row['near_ties']} near ties)",
                      "ok" if row["passed"] else "FAILED")  # fmt: skip
    out.print(table)


def show_speeds(report: Report) -> None:
    table = Table("k", "engine", "tokens/s", "ceiling", "share", "x libllama", title_justify="left",
                  title="drafting; ceiling = bandwidth / bytes read per token")  # fmt: skip
    for row in report.rows:
        table.add_row(str(row["k"]), row["engine"], f"{row['tokens_per_s']:.1f}",
                      f"{row['ceiling_tokens_per_s']:.1f}", f"{row['share_of_ceiling']:.1%}",
                      f"{row['vs_llama']:.2f}")  # fmt: skip
    out.print(table)
    for speed in report.speeds:
        if speed["taken_bytes"]:
            out.print(f"{speed['name']}: {speed['taken_bytes'] / 2**20:.0f} MiB taken, "
                      f"{speed['planned_bytes'] / 2**20:.0f} planned, "
                      f"{speed['left_bytes'] / 2**20:.0f} not given back")  # fmt: skip
