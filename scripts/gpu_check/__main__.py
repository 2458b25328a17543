"""`scripts/gpu-check`: measures a GPU and prints tables, then one JSON object on the last line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compare import equality_of
from link import measure_link
from rich.console import Console
from rich.table import Table
from split_layers import Asked, aims, measure_split, passed
from steps import Workload, ceilings, measure_peers, measure_ways
from switches import measure_switches

from offload.device import DeviceChoice, choose_device, devices
from offload.model_file import read_facts
from offload.synth import plan_preset, write_preset
from offload.synth.routing import ROUTINGS
from offload.units import parse_bytes
from specoffload.commands.bench import commit, machine

out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)

# DeepSeek-V3 with its widths, fewer layers and experts: the experts of 7 layers are 11 GB at q4_K.
BIG: dict[str, Any] = {
    "size": "full",
    "n_layer": 8,
    "n_expert": 64,
    "n_vocab": 32000,
    "quant": "q4_K",
    "metadata": {"leading_dense_block_count": 1},
}
SMALL: dict[str, Any] = {"size": "tiny-vulkan"}


@dataclass
class Report:
    """What the last line says."""

    device: str
    machine: dict[str, Any]
    commit: str | None
    dry_run: bool
    link: dict[str, Any] = field(default_factory=dict)
    equality: list[dict[str, Any]] = field(default_factory=list)
    gpu_tests: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    switches: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    split: list[dict[str, Any]] = field(default_factory=list)
    aims: dict[str, bool] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    error: str = ""
    ok: bool = False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("part", nargs="?", choices=["split"], help="only this; else all")
    parser.add_argument("--device", default="auto", help="a name ggml knows, e.g. CUDA0")
    parser.add_argument("--vram", default="6GiB", help="budget for weights and slots")
    parser.add_argument("--batches", default="4,16,64,512,2048", help="tokens per step")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of llama.cpp's CPU part; 0: all")
    parser.add_argument("--routing", choices=ROUTINGS, default="drifting", help="of split")
    parser.add_argument("--share", type=float, default=0.25,
                        help="of expert bytes on the device, in split")  # fmt: skip
    parser.add_argument("--llama-server", type=Path,
                        help="a program that decodes the same, as a rival")  # fmt: skip
    parser.add_argument("--limit-s", type=float, default=540.0, help="later parts are left out")
    parser.add_argument("--model-dir", type=Path, help="where the model is written and kept")
    parser.add_argument("--small", action="store_true", help="a tiny model, for slow devices")
    parser.add_argument("--dry-run-sim", action="store_true", help="--small on the CPU as sim")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.small |= args.dry_run_sim
    if args.small:
        args.batches, args.repetitions, args.threads = "4,16", 2, 1
    choice = choose_device("sim:bw=1GB/s" if args.dry_run_sim else args.device)
    if not choice.wrapped:
        names = ", ".join(device.name for device in devices())
        out.print(f"no GPU here (ggml knows {names}): run this where one is, or with --dry-run-sim",
                  soft_wrap=True)  # fmt: skip
        return 2
    report = Report(choice.name, machine(), commit(), args.dry_run_sim)
    out.print(f"{choice.name}: {choice.description}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model_dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            measure(args, choice, folder, report)
        except Exception as e:  # what was measured before is still worth its line
            report.error = f"{type(e).__name__}: {e}"
            traceback.print_exc()
    out.print(json.dumps(asdict(report)), soft_wrap=True, markup=False)
    return 0 if report.ok else 1


def measure(args: argparse.Namespace, choice: DeviceChoice, folder: Path, report: Report) -> None:
    start = time.monotonic()

    def done(part: str) -> float:
        report.seconds[part] = round(time.monotonic() - start, 1)
        return float(args.limit_s - report.seconds[part])

    report.link = measure_link(choice, (4 if args.small else 256) << 20)
    show_link(report.link)
    done("link")
    if args.part is None:
        measure_streaming(args, choice, folder, report, done)
    measure_hybrid(args, choice, folder, report, done)
    equal = all(row["passed"] for row in report.equality) and all(
        row["max_difference"] < row["allowed"] for row in report.steps
    )
    report.ok = equal and "failed" not in report.gpu_tests and passed(
        report.split, all_of_them=args.part == "split"
    )  # fmt: skip


def measure_streaming(
    args: argparse.Namespace,
    choice: DeviceChoice,
    folder: Path,
    report: Report,
    done: Callable[[str], float],
) -> None:
    report.equality = [asdict(row) for row in equality_of(choice, folder)]
    show_equality(report.equality)
    report.gpu_tests = "left out with --small" if args.small else run_gpu_tests()
    out.print(f"tests/gpu: {report.gpu_tests}")
    done("equality")
    load = workload(args, choice, folder)
    facts = read_facts(load.path)
    expert_bytes = sum(e.size_bytes for e in facts.expert_weights)
    report.model = {"name": load.path.name, "size_bytes": facts.size_bytes,
                    "expert_bytes": expert_bytes, "vram_bytes": load.vram_bytes}  # fmt: skip
    out.print(f"{facts.size_bytes / 1e9:.2f} GB, {expert_bytes / 1e9:.2f} of it experts, through "
              f"{load.vram_bytes / 1e9:.2f} GB")  # fmt: skip
    done("model")
    report.switches = measure_switches(load, lambda: done("switches") - args.limit_s / 2)
    show_switches(report.switches)
    ways, report.model["store"] = measure_ways(load)
    out.print(report.model["store"], soft_wrap=True)
    done("ours")
    peers = measure_peers(load, lambda: done("peers"))
    link = choice.sim.bandwidth_bytes_per_s if choice.sim else None
    report.steps = ceilings(load, ways, peers, link or report.link["pinned_bytes_per_s"])
    show_steps(report.steps)
    done("peers")


def measure_hybrid(
    args: argparse.Namespace,
    choice: DeviceChoice,
    folder: Path,
    report: Report,
    done: Callable[[str], float],
) -> None:
    asked = Asked(choice, folder, args.threads or int(machine()["cores"] or 1),
                  lambda: done("split"), args.small, args.routing, args.share,
                  args.llama_server)  # fmt: skip
    report.split = measure_split(asked, out.print)
    for row in report.split:
        show_split(row)
    report.aims = {} if args.small else aims(report.split)  # tiny models say nothing of speed
    for words, met in report.aims.items():
        out.print(f"{'met' if met else 'MISSED'}: {words}", soft_wrap=True)
    done("split")


def workload(args: argparse.Namespace, choice: DeviceChoice, folder: Path) -> Workload:
    """The model that does not fit the budget, written if it is not there."""
    path = folder / ("small.gguf" if args.small else "big.gguf")
    shape = SMALL if args.small else BIG
    if not path.exists():
        planned = plan_preset("deepseek-v3", **shape)
        out.print(f"writing {planned.size_bytes / 1e9:.2f} GB")
        write_preset("deepseek-v3", path, seed=7, **shape)
    facts = read_facts(path)
    expert_bytes = sum(e.size_bytes for e in facts.expert_weights)
    vram_bytes = parse_bytes(args.vram)
    if args.small:
        vram_bytes = facts.size_bytes - expert_bytes // 2
    batches = tuple(int(n) for n in args.batches.split(","))
    return Workload(path, choice, vram_bytes, batches, args.repetitions,
                    args.threads or int(machine()["cores"] or 1),
                    "off" if args.small else "auto")  # fmt: skip


def run_gpu_tests() -> str:
    """tests/gpu in a process of its own; the last line of its output."""
    if importlib.util.find_spec("pytest") is None:
        return "left out: pytest is not installed"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-o", "addopts=",
               "-o", "filterwarnings=default", "-p", "no:cacheprovider"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        return "failed: more than 240 s"
    lines = (done.stdout + done.stderr).strip().splitlines() or ["failed without a word"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            out.print(line, markup=False, soft_wrap=True)
    return lines[-1] if done.returncode == 0 else f"failed: {lines[-1]}"


def show_link(link: dict[str, Any]) -> None:
    table = Table("host memory", "GB/s", title="host to device", title_justify="left")
    for kind in ("pinned", "pageable"):
        table.add_row(kind, f"{link[f'{kind}_bytes_per_s'] / 1e9:.2f}")
    out.print(table)
    if link["why_not_pinned"]:
        out.print(f"not pinned: {link['why_not_pinned']}", soft_wrap=True)


def show_equality(rows: list[dict[str, Any]]) -> None:
    table = Table("equality", "model", "equal bits", "worst row's error", "allowed", "",
                  title_justify="left")  # fmt: skip
    for row in rows:
        table.add_row(row["what"], row["model"], f"{row['equal_share']:.1%}",
                      f"{row['error']:.2e}", f"{row['allowed']:.0e}",
                      "ok" if row["passed"] else "FAILED")  # fmt: skip
    out.print(table)


def show_switches(rows: list[dict[str, Any]]) -> None:
    table = Table("switch", "tokens", "without ms", "with ms", "x", title="each switch",
                  title_justify="left")  # fmt: skip
    for row in rows:
        table.add_row(row["switch"], str(row["n"]), f"{row['default_s'] * 1e3:.2f}",
                      f"{row['step_s'] * 1e3:.2f}", f"{row['ratio']:.2f}")  # fmt: skip
    out.print(table)


def show_steps(rows: list[dict[str, Any]]) -> None:
    columns = ("tokens", "compute ms", "transfer ms", "serial ms", "overlapped ms", "x ceiling",
               "llama.cpp ms, all offloaded", "x", "its default ms", "x")  # fmt: skip
    title = "one step; ceiling = max(compute, transfer)"
    table = Table(*columns, title=title, title_justify="left")

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.2f}"

    def times(ratio: float | None) -> str:
        return "-" if ratio is None else f"{ratio:.2f}"

    for row in rows:
        table.add_row(str(row["n"]), ms(row["compute_s"]), ms(row["transfer_s"]),
                      ms(row["serial_s"]), ms(row["step_s"]), times(row["ratio"]),
                      ms(row["offload_s"]), times(row["vs_offload"]),
                      ms(row["default_s"]), times(row["vs_default"]))  # fmt: skip
    out.print(table)


def show_split(row: dict[str, Any]) -> None:
    if "left_out" in row:
        out.print(f"split layers of {row['model']} are left out: {row['left_out']}")
        return
    title = (f"{row['model']}, routing {row['routing']}: {row['cached_share']:.0%} of "
             f"{row['expert_bytes'] / 1e9:.2f} GB of experts on the device")  # fmt: skip
    speeds = Table("way", "ms a token", "tokens/s", "x llama.cpp", "x off", "VRAM taken GB",
                   title=title, title_justify="left")  # fmt: skip
    work = Table("way, by token", "pairs hit", "streamed", "the CPU's", "hits", "CPU ms",
                 "split ms", "promoted", "MB streamed", title_justify="left")  # fmt: skip
    for way in row["ways"]:
        speeds.add_row(way["way"], f"{way['token_s'] * 1e3:.2f}", f"{way['tokens_per_s']:.1f}",
                       f"{way['vs_llama']:.2f}", f"{way['vs_off']:.2f}",
                       f"{way['taken_bytes'] / 1e9:.2f}")  # fmt: skip
        if "split_layers" in way:
            pairs = [f"{way[f'n_pairs_{kind}']:.1f}" for kind in ("hit", "streamed", "host")]
            share = way["hit_share"]
            work.add_row(way["way"], *pairs, "-" if share is None else f"{share:.0%}",
                         f"{way['host_s'] * 1e3:.2f}", f"{way['split_s'] * 1e3:.2f}",
                         f"{way['n_promoted']:.2f}",
                         f"{way['streamed_bytes'] / 1e6:.1f}")  # fmt: skip
    out.print(speeds, work)
    for its in row["llama_server"]:
        found = its.get("left_out") or f"{its['token_s'] * 1e3:.2f} ms a token"
        out.print(f"{its['way']}: {found}", soft_wrap=True, markup=False)
    out.print(f"best rival: {row['best_rival']}, {row['best_rival_s'] * 1e3:.2f} ms a token; "
              f"on {row['vs_best_rival']['on']:.2f} x, auto {row['vs_best_rival']['auto']:.2f} x",
              soft_wrap=True, markup=False)  # fmt: skip
    link = row["expert_copy_bytes_per_s"] / 1e9
    out.print(f"llama.cpp computes the experts of {row['n_cpu_moe']} of {row['n_layers']} layers "
              f"on the CPU; an expert of {row['one_expert_bytes'] / 1e6:.2f} MB is copied at "
              f"{link:.1f} GB/s; Python takes {row['python_s_per_layer'] * 1e6:.0f} us of a split "
              "layer", soft_wrap=True)  # fmt: skip
    for name, lines in row["notes"].items():
        for line in lines:
            out.print(f"--hybrid {name}: {line}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["draft"]:
        import draft

        sys.exit(draft.main(sys.argv[2:]))
    sys.exit(main())
