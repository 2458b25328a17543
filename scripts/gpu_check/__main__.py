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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from split import Asked, aims, measure_split, passed
from steps import Workload, measure_link, measure_peers, measure_ways, step_rows

from lab.synth import plan_preset, write_preset
from lab.synth.routing import ROUTINGS
from offload.device import DeviceChoice, choose_device, devices
from offload.errors import DeviceUnavailable
from offload.model_file import read_facts
from offload.torch_draft.layout import DTYPES
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
_DRAFT_S = 120.0  # time left that is needed to begin with the draft
_TESTS_S = 240


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    add = parser.add_argument
    add("part", nargs="?", choices=["split", "draft"], help="measure this alone; default: all")
    add("--device", default="auto", help="a name ggml knows, e.g. CUDA0; cpu for the draft alone")
    add("--vram", default="6GiB", help="budget for weights and slots")
    add("--batches", default="4,16,64,512,2048", help="tokens per step")
    add("--repetitions", type=int, default=5)
    add("--threads", type=int, default=0, help="of llama.cpp's CPU part; 0: all")
    add("--routing", choices=ROUTINGS, default="drifting", help="of the split layers' models")
    add("--share", type=float, default=0.25, help="of expert bytes on the device, in split")
    add("--llama-server", type=Path, help="a program that decodes the same, as a rival")
    add("--k", default="1,4,8,16", help="tokens per draft")
    add("--depth", type=int, default=512, help="tokens before each draft")
    add("--quant", default="q8_0", help="of the draft's file")
    add("--type", default="bf16", choices=DTYPES, help="of the torch draft's matrices")
    add("--kept", type=int, default=32768, help="tokens of the draft's pruned vocabulary")
    add("--limit-s", type=float, default=540.0, help="leave out later parts after this time")
    add("--model-dir", type=Path, help="folder to keep the written models in")
    add("--small", action="store_true", help="tiny models, for slow devices")
    add("--dry-run-sim", action="store_true", help="--small on the CPU posing as a GPU")
    args = parser.parse_args()
    args.small |= args.dry_run_sim
    if args.small:
        args.batches, args.repetitions, args.threads = "4,16", 2, 1
        args.k, args.depth, args.kept = "1,4", 32, 128
    args.threads = args.threads or int(machine()["cores"] or 1)
    return args


def main() -> int:
    args = arguments()
    choice = choose_device("sim:bw=1GB/s" if args.dry_run_sim else args.device)
    if not choice.wrapped and not (args.part == "draft" and args.device == "cpu"):
        names = ", ".join(device.name for device in devices())
        say(f"no GPU here (ggml knows {names}): run this where one is, or with --dry-run-sim")
        return 2
    say(f"{choice.name}: {choice.description}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model_dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        check = Check(args, choice, folder)
        try:
            check.run()
        except Exception as e:  # print what was measured before
            check.report["error"] = f"{type(e).__name__}: {e}"
            traceback.print_exc()
    out.print(json.dumps(check.report), soft_wrap=True, markup=False)
    return 0 if check.report["ok"] else 1


class Check:
    """The parts of the check, in order, and the report that they fill."""

    def __init__(self, args: argparse.Namespace, choice: DeviceChoice, folder: Path) -> None:
        self.args, self.choice, self.folder = args, choice, folder
        self.start = time.monotonic()
        self.report: dict[str, Any] = {
            "device": choice.name, "machine": machine(), "commit": commit(),
            "dry_run": args.dry_run_sim, "link": {}, "gpu_tests": "", "model": {}, "steps": [],
            "split": [], "draft": {}, "aims": {}, "seconds": {}, "error": "", "ok": False,
        }  # fmt: skip

    def left_s(self) -> float:
        return float(self.args.limit_s - (time.monotonic() - self.start))

    def run(self) -> None:
        part = self.args.part
        oks = []
        for name in ("streaming", "split", "draft"):
            if part in (None, name):
                oks.append(getattr(self, name)())
                self.report["seconds"][name] = round(time.monotonic() - self.start, 1)
        for words, met in self.report["aims"].items():
            say(f"{'met' if met else 'MISSED'}: {words}")
        self.report["ok"] = all(oks)

    def streaming(self) -> bool:
        """The link, tests/gpu, and times of one step beside llama.cpp's. True if all is equal."""
        report, choice = self.report, self.choice
        link = report["link"] = measure_link(choice, (4 if self.args.small else 256) << 20)
        rows = [{"from": kind, "rate": link[f"{kind}_bytes_per_s"]} for kind in
                ("pinned", "pageable")]  # fmt: skip
        show("host to device", rows, ("host memory", "from"), ("GB/s", "rate", 1e-9))
        if link["why_not_pinned"]:
            say(f"not pinned: {link['why_not_pinned']}")
        report["gpu_tests"] = "left out with --small" if self.args.small else run_gpu_tests()
        say(f"tests/gpu: {report['gpu_tests']}")
        load = self.workload()
        facts = read_facts(load.path)
        expert_bytes = sum(e.size_bytes for e in facts.expert_weights)
        report["model"] = {"name": load.path.name, "size_bytes": facts.size_bytes,
                           "expert_bytes": expert_bytes, "vram_bytes": load.vram_bytes}  # fmt: skip
        say(f"{facts.size_bytes / 1e9:.2f} GB, {expert_bytes / 1e9:.2f} of it experts, through "
            f"{load.vram_bytes / 1e9:.2f} GB")  # fmt: skip
        ways, report["model"]["store"] = measure_ways(load)
        say(report["model"]["store"])
        rate = choice.sim.bandwidth_bytes_per_s if choice.sim else None
        rate = rate or link["pinned_bytes_per_s"]
        steps = report["steps"] = step_rows(load, ways, measure_peers(load, self.left_s), rate)
        show(
            "one step; ceiling = max(compute, transfer)", steps,
            ("tokens", "n"), ("compute ms", "compute_s", 1e3), ("transfer ms", "transfer_s", 1e3),
            ("serial ms", "serial_s", 1e3), ("overlapped ms", "step_s", 1e3),
            ("x ceiling", "ratio"), ("llama.cpp ms, all offloaded", "offload_s", 1e3),
            ("x", "vs_offload"), ("its default ms", "default_s", 1e3), ("x", "vs_default"),
        )  # fmt: skip
        equal = all(row["max_difference"] < row["allowed"] for row in steps)
        return equal and "failed" not in report["gpu_tests"]

    def workload(self) -> Workload:
        """The model that does not fit the budget, written if it is not there."""
        args = self.args
        path = self.folder / ("small.gguf" if args.small else "big.gguf")
        shape = SMALL if args.small else BIG
        if not path.exists():
            say(f"writing {plan_preset('deepseek-v3', **shape).size_bytes / 1e9:.2f} GB")
            write_preset("deepseek-v3", path, seed=7, **shape)
        facts = read_facts(path)
        vram_bytes = parse_bytes(args.vram)
        if args.small:
            vram_bytes = facts.size_bytes - sum(e.size_bytes for e in facts.expert_weights) // 2
        batches = tuple(int(n) for n in args.batches.split(","))
        return Workload(path, self.choice, vram_bytes, batches, args.repetitions, args.threads,
                        "off" if args.small else "auto")  # fmt: skip

    def split(self) -> bool:
        """Decoding with split layers beside llama.cpp. True if all models are what they should."""
        args = self.args
        asked = Asked(self.choice, self.folder, args.threads, self.left_s, args.small,
                      args.routing, args.share, args.llama_server)  # fmt: skip
        rows = self.report["split"] = measure_split(asked, say)
        for row in rows:
            show_split(row)
        if not args.small:  # tiny models say nothing of speed
            self.report["aims"] |= aims(rows)
        return passed(rows, all_of_them=args.part == "split")

    def draft(self) -> bool:
        """The draft in torch beside libllama's. True if it computes the same or is left out."""
        args, found = self.args, self.report["draft"]
        from offload.torch_draft.devices import check_device, torch_name

        try:
            if args.part is None and not args.small and self.left_s() < _DRAFT_S:
                raise DeviceUnavailable(f"{self.left_s():.0f} s are left")
            on_gpu = self.choice.on_gpu
            where = torch_name(self.choice.name if on_gpu else "cpu", on_gpu=on_gpu)
            check_device(where)
        except DeviceUnavailable as e:
            found["left_out"] = str(e)
            say(f"the draft in torch is left out: {e}")
            return args.part is None
        import draft  # needs torch

        from offload.torch_draft.layout import TorchDraftOptions

        equality = found["equality"] = list(draft.equality_of(where, self.folder))
        show(
            "drafts are equal", equality,
            ("equality", "what"), ("model", "model"), ("difference of p", "worst"),
            ("allowed", "allowed"), ("tokens", "n_tokens"), ("others", "n_other"),
            ("near ties", "near_ties"), ("", "passed"),
        )  # fmt: skip
        size = "tiny" if args.small else "full"
        path = self.folder / f"draft-{size}-{args.quant}.gguf"
        if not path.exists():
            say(f"writing {path.name}")
            write_preset("qwen2.5-0.5b", path, size=size, quant=args.quant, seed=7)
        found |= draft.measure_speeds(
            path, self.choice.name if on_gpu else "cpu",
            TorchDraftOptions(where, dtype=args.type, n_threads=args.threads),
            [int(n) for n in args.k.split(",")],
            depth=args.depth, repetitions=args.repetitions, n_kept=args.kept,
        )  # fmt: skip
        title = f"drafting; ceiling = {found['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s / bytes read"
        show(
            title, found["rows"],
            ("k", "k"), ("engine", "engine"), ("tokens/s", "tokens_per_s"),
            ("ceiling", "ceiling_tokens_per_s"), ("share of it", "share_of_ceiling"),
            ("x libllama", "vs_llama"),
        )  # fmt: skip
        memory = [speed for speed in found["speeds"] if "taken_bytes" in speed]
        if memory:
            mib = 1 / 2**20
            show("MiB of memory", memory, ("engine", "name"), ("planned", "planned_bytes", mib),
                 ("taken", "taken_bytes", mib), ("not given back", "left_bytes", mib))  # fmt: skip
        if not args.small:
            self.report["aims"] |= draft.aims(found)
        return all(row["passed"] for row in equality)


def run_gpu_tests() -> str:
    """The last line of tests/gpu, run in a process of its own."""
    if importlib.util.find_spec("pytest") is None:
        return "left out: pytest is not installed"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-o", "addopts=",
               "-o", "filterwarnings=default", "-p", "no:cacheprovider"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TESTS_S)
    except subprocess.TimeoutExpired:
        return f"failed: more than {_TESTS_S} s"
    lines = (done.stdout + done.stderr).strip().splitlines() or ["failed without a word"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            say(line)
    return lines[-1] if done.returncode == 0 else f"failed: {lines[-1]}"


def say(line: str) -> None:
    out.print(line, soft_wrap=True, markup=False)


def show(
    title: str, rows: Sequence[dict[str, Any]], *columns: tuple[str, str] | tuple[str, str, float]
) -> None:
    """Print a table. Columns are (heading, key) or (heading, key, factor)."""
    table = Table(*(heading for heading, *_ in columns), title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_cell(row.get(key), *factor) for _, key, *factor in columns))
    out.print(table)


def _cell(value: object, factor: float = 1) -> str:
    if isinstance(value, bool):
        return "ok" if value else "FAILED"
    if isinstance(value, int | float) and (factor != 1 or isinstance(value, float)):
        scaled = value * factor
        return f"{scaled:.2f}" if scaled == 0 or abs(scaled) >= 0.1 else f"{scaled:.2g}"
    return "-" if value is None else str(value)


def show_split(row: dict[str, Any]) -> None:
    if "left_out" in row:
        say(f"split layers of {row['model']} are left out: {row['left_out']}")
        return
    title = (f"{row['model']}, routing {row['routing']}: {row['cached_share']:.0%} of "
             f"{row['expert_bytes'] / 1e9:.2f} GB of experts on the device")  # fmt: skip
    show(
        title, row["ways"],
        ("way", "way"), ("ms a token", "token_s", 1e3), ("tokens/s", "tokens_per_s"),
        ("x llama.cpp", "vs_llama"), ("x off", "vs_off"), ("VRAM taken GB", "taken_bytes", 1e-9),
    )  # fmt: skip
    show(
        "per token", [way for way in row["ways"] if "split_layers" in way],
        ("way", "way"), ("pairs hit", "n_pairs_hit"), ("streamed", "n_pairs_streamed"),
        ("on the CPU", "n_pairs_host"), ("hit share", "hit_share"), ("CPU ms", "host_s", 1e3),
        ("split ms", "split_s", 1e3), ("promoted", "n_promoted"),
        ("MB streamed", "streamed_bytes", 1e-6),
    )  # fmt: skip
    for its in row["llama_server"]:
        took = its.get("left_out") or f"{its['token_s'] * 1e3:.2f} ms a token"
        say(f"{its['way']}: {took}")
    say(
        f"best rival: {row['best_rival']}, {row['best_rival_s'] * 1e3:.2f} ms a token; "
        f"on {row['vs_best_rival']['on']:.2f} x, auto {row['vs_best_rival']['auto']:.2f} x"
    )
    say(f"llama.cpp computes the experts of {row['n_cpu_moe']} of {row['n_layers']} layers on the "
        f"CPU; an expert of {row['one_expert_bytes'] / 1e6:.2f} MB is copied at "
        f"{row['expert_copy_bytes_per_s'] / 1e9:.1f} GB/s; Python takes "
        f"{row['python_s_per_layer'] * 1e6:.0f} us of a split layer")  # fmt: skip
    for name, lines in row["notes"].items():
        for line in lines:
            say(f"--hybrid {name}: {line}")


if __name__ == "__main__":
    sys.exit(main())
