"""`scripts/gpu-check`: measures a GPU and prints tables, then one JSON object on the last line."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from needed import LLAMA, Requirement, canonicalize_name, of_project
from timed_parts import PASSED, LeftOut, NoGpu, Part, Report, emit, run_parts

if TYPE_CHECKING:
    from setting import Setting  # needs packages that are checked first

_IMPORTS_S = 60.0  # most time for imports and for the driver's start
_DRAFT_S = 60.0  # least time for the draft's part
_MEMORY = Path("/dev/shm")
_MODEL_BYTES = 24 << 30  # of the largest model, and some more
_ALL_BYTES = 96 << 30  # a model in memory, and four ways to stream it
ALL_BATCHES = "4,16,64,512,2048"
_MODULES = {"prometheus-client": "prometheus_client", LLAMA: "llama_cpp"}

FLAGS: dict[str, dict[str, Any]] = {
    "--second": {"action": "store_true", "help": "the second call: draft, gpt-oss, more rounds"},
    "--device": {"default": "auto", "help": "a name ggml knows, e.g. CUDA0; cpu: the draft alone"},
    "--vram": {"default": "6GiB", "help": "budget for weights and slots"},
    "--batches": {"help": f"tokens per step (512,2048; streaming and --second: {ALL_BATCHES})"},
    "--repetitions": {"type": int, "default": 5},
    "--rounds": {"type": int, "help": "turns of each way, in split (3; alone and --second: 9)"},
    "--threads": {"type": int, "default": 0, "help": "threads of the CPU's part; 0: all"},
    "--routing": {"choices": ("drifting", "skewed"), "default": "drifting",
                  "help": "of split layers' models"},
    "--share": {"type": float, "default": 0.25, "help": "of expert bytes on the device, in split"},
    "--llama-server": {"type": Path, "help": "your own build, as a rival of split layers"},
    "--k": {"default": "1,4,8,16", "help": "tokens per draft"},
    "--depth": {"type": int, "default": 512, "help": "tokens before each draft"},
    "--quant": {"default": "q8_0", "help": "types of the draft's file"},
    "--type": {"choices": ("f32", "bf16"), "default": "bf16",
               "help": "type of the torch draft's matrices"},
    "--kept": {"type": int, "default": 32768, "help": "tokens of the draft's pruned vocabulary"},
    "--limit-s": {"type": float, "default": 540.0, "help": "time for all parts together"},
    "--model-dir": {"type": Path, "help": "folder to keep the written models in"},
    "--out": {"type": Path, "help": "folder for the JSON object and the log; default: $OUT"},
    "--small": {"action": "store_true", "help": "tiny models, for slow devices"},
    "--dry-run-sim": {"action": "store_true", "help": "--small on the CPU posing as a GPU"},
    "--spent-s": {"type": float, "default": 0.0, "help": argparse.SUPPRESS},
    "--inside": {"action": "store_true", "help": argparse.SUPPRESS},  # of compute-sanitizer
}  # fmt: skip

# Each part's share of the time limit, by call. docs/gpu.md has the seconds.
FIRST = {"link": 25, "equality": 45, "memories": 20, "sanitizer": 60, "decode": 105, "split": 125,
         "prefill": 80, "tests": 70}  # fmt: skip
SECOND = {"draft": 130, "split": 235, "prefill": 95, "steps-table": 70}
# What an argument chooses. `streaming` is what was called so before its parts had names.
CHOICES = {
    **{name: (name,) for name in (*FIRST, *SECOND)},
    "streaming": ("link", "prefill", "tests"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("part", nargs="?", choices=list(CHOICES), help="measure this alone")
    for flag, settings in FLAGS.items():
        parser.add_argument(flag, **settings)
    args = parser.parse_args()
    args.small |= args.dry_run_sim
    more = args.second or args.part is not None
    args.batches = args.batches or (ALL_BATCHES if more else "512,2048")
    args.rounds = args.rounds or (9 if more else 3)
    args.models = ("qwen3moe", "gpt-oss") if more else ("qwen3moe",)
    if args.small:
        args.models = ("gpt-oss",) if args.second else args.models
        args.batches, args.repetitions, args.threads, args.rounds = "4,16", 2, 1, 2
        args.k, args.depth, args.kept = "1,4", 32, 128
    if args.out is None and os.environ.get("OUT") and not args.inside:
        args.out = Path(os.environ["OUT"])
    return args


def shares_of(args: argparse.Namespace) -> dict[str, float]:
    """The parts of this call in their order, with their shares of the time."""
    shares: dict[str, float] = dict(SECOND if args.second else FIRST)
    if args.part is not None:
        known = {**SECOND, **FIRST}
        shares = {name: known[name] for name in CHOICES[args.part]}
    return shares


def import_all() -> list[str]:
    """Import every package that pyproject.toml needs. Returns a sentence for each failure."""
    failures = []
    for name in (canonicalize_name(Requirement(line).name) for line in of_project()):
        module = _MODULES.get(name, name.replace("-", "_"))
        try:
            importlib.import_module(module)
        except Exception as e:  # e.g. OSError for a library of CUDA that is not found
            failures.append(f"import {module}: {type(e).__name__}: {e}")
    return failures


def draft(setting: Setting) -> bool:
    """Measure the draft in torch beside libllama's. Raises LeftOut without torch."""
    from offload.errors import DeviceUnavailable
    from specoffload.opening.draft import check_device, torch_name

    on_gpu = setting.choice.on_gpu
    try:
        device = torch_name(setting.choice.name if on_gpu else "cpu", on_gpu=on_gpu)
        check_device(device)
        setting.least_s(_DRAFT_S)
    except (DeviceUnavailable, LeftOut) as e:
        setting.report["draft"]["left_out"] = str(e)
        raise LeftOut(str(e)) from e
    module = importlib.import_module("draft")  # needs torch
    return bool(module.measure(setting, device))


def imports(setting: Setting) -> bool:
    """Choose the device, and name it. Raises NoGpu."""
    from offload.device import devices
    from specoffload.commands.bench import commit, machine

    args, choice = setting.args, setting.choice
    if not choice.wrapped and not (args.part == "draft" and args.device == "cpu"):
        names = ", ".join(device.name for device in devices())
        setting.say(f"no GPU here (ggml knows {names}): run this on a GPU, or with --dry-run-sim")
        raise NoGpu
    setting.report |= {"device": choice.name, "machine": machine(), "commit": commit()}
    setting.say(f"{choice.name}: {choice.description}")
    return True


# Where the others' functions are.
MEASURES = {
    "link": "link.measure", "equality": "equality.measure", "sanitizer": "equality.sanitized",
    "memories": "memories.measure", "decode": "decode.measure", "split": "split.measure",
    "prefill": "steps.measure", "tests": "gpu_tests.measure", "steps-table": "steps_table.measure",
}  # fmt: skip


def measure_of(name: str) -> Callable[[Setting], bool]:
    """The function that measures a part. Nothing is imported before it is needed."""
    if name == "draft":
        return draft
    module, _, function = MEASURES[name].partition(".")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


class Check:
    """One call of the check: its arguments, its report and its log."""

    def __init__(
        self, args: argparse.Namespace, scratch: Path, report: Report, log: BinaryIO
    ) -> None:
        """`scratch`: a folder that is removed at the end, with all that a part leaves there."""
        self.args, self.report = args, report
        self._scratch, self._log = scratch, log

    def run(self, start_s: float) -> int:
        """Run all parts, the first of which imports everything. Returns the exit status."""
        if self.args.inside:  # one process, which compute-sanitizer watches
            end_s = start_s + self.args.limit_s
            return 0 if measure_of(self.args.part)(self._setting(end_s)) else 1
        shares, limit_s = shares_of(self.args), self.args.limit_s - self.args.spent_s
        first = [Part("imports", 1.0, self._imports)]
        others = [Part(name, share, self._part(name)) for name, share in shares.items()]
        try:
            ok = run_parts(first, self.report, self._log, start_s=start_s,
                           limit_s=min(_IMPORTS_S, limit_s))  # fmt: skip
        except NoGpu:
            return 2
        if ok:
            for name in shares:  # here once, not again in each part's process
                measure_of(name)
            now_s = time.monotonic()
            ok = run_parts(others, self.report, self._log, start_s=now_s,
                           limit_s=limit_s - (now_s - start_s))  # fmt: skip
        values = self.report.values
        if self.args.part in shares:  # a part that was asked for by name may not be left out
            ok &= values["parts"].get(self.args.part, {}).get("status") == PASSED
        values["ok"] = ok
        self.report.save()
        self._end()
        return 0 if ok else 1

    def _part(self, name: str) -> Callable[[float], bool]:
        return lambda end_s: measure_of(name)(self._setting(end_s))

    def _imports(self, end_s: float) -> bool:
        failures = self.report.values["imports"] = import_all()
        for line in failures:
            print(f"gpu-check: {line}")
        return not failures and imports(self._setting(end_s))

    def _setting(self, end_s: float) -> Setting:
        from rich.console import Console
        from setting import Setting

        from specoffload.commands.bench import machine

        self.args.threads = self.args.threads or int(machine()["cores"] or 1)
        tempfile.tempdir = str(self._scratch)
        folder, out = self.args.model_dir or self._scratch, Console(highlight=False, width=120)
        return Setting(self.args, folder, self.report.values, out, end_s, self.report.save)

    def _end(self) -> None:
        """Print the parts' times, the aims, and the JSON object on the last line."""
        values = self.report.values
        lines = [f"{name}: {part['status']} ({part['s']:.0f} s)"
                 for name, part in values["parts"].items()]  # fmt: skip
        lines += [f"aim {'met' if met else 'MISSED'}: {words}"
                  for words, met in values["aims"].items()]  # fmt: skip
        emit(self._log, "".join(f"{line}\n" for line in [*lines, json.dumps(values)]).encode())


def new_report(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": "", "machine": {}, "commit": "", "dry_run": args.dry_run_sim, "parts": {},
        "imports": [], "link": {}, "equality": [], "memories": [], "sanitizer": {}, "decode": [],
        "gpu_tests": "", "model": {}, "steps": [], "steps_table": {}, "split": [], "draft": {},
        "aims": {}, "seconds": {}, "error": "", "ok": False,
    }  # fmt: skip


def scratch_parent(args: argparse.Namespace) -> str | None:
    """The folder for models that are not kept: memory if it has room, else the usual one.

    Models that are written to a disk, and read past its cache for each way, take most of the time.
    """
    if args.small or args.model_dir is not None or not _MEMORY.is_dir():
        return None
    has_room = shutil.disk_usage(_MEMORY).free >= _MODEL_BYTES
    return str(_MEMORY) if has_room and _available_bytes() >= _ALL_BYTES else None


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib) << 10


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that the models are removed


def main() -> int:
    start_s, args = time.monotonic(), arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    with tempfile.TemporaryDirectory(dir=scratch_parent(args)) as scratch:
        out = args.out or Path(scratch)
        for folder in (out, args.model_dir or out):
            folder.mkdir(parents=True, exist_ok=True)
        name = "gpu-check-second" if args.second else "gpu-check"
        report = Report(out / f"{name}.json", new_report(args))
        with (out / f"{name}.log").open("wb") as log:
            return Check(args, Path(scratch), report, log).run(start_s)


if __name__ == "__main__":
    raise SystemExit(main())
