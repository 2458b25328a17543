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
from pathlib import Path
from typing import Any

import split
import steps
from rich.console import Console
from setting import Setting, show

from lab.synth.routing import ROUTINGS
from offload.device import choose_device, devices
from offload.errors import DeviceUnavailable
from offload.torch_draft.plan import DTYPES
from specoffload.commands.bench import commit, machine

_DRAFT_S = 120.0  # least seconds left for the draft's part to begin
_TESTS_S = 240

FLAGS: dict[str, dict[str, Any]] = {
    "--device": {"default": "auto", "help": "a name ggml knows, e.g. CUDA0; cpu: the draft alone"},
    "--vram": {"default": "6GiB", "help": "budget for weights and slots"},
    "--batches": {"default": "4,16,64,512,2048", "help": "tokens per step"},
    "--repetitions": {"type": int, "default": 5},
    "--threads": {"type": int, "default": 0, "help": "threads of the CPU's part; 0: all"},
    "--routing": {"choices": ROUTINGS, "default": "drifting", "help": "of split layers' models"},
    "--share": {"type": float, "default": 0.25, "help": "of expert bytes on the device, in split"},
    "--llama-server": {"type": Path, "help": "your own build, as a rival of split layers"},
    "--k": {"default": "1,4,8,16", "help": "tokens per draft"},
    "--depth": {"type": int, "default": 512, "help": "tokens before each draft"},
    "--quant": {"default": "q8_0", "help": "types of the draft's file"},
    "--type": {"default": "bf16", "choices": DTYPES, "help": "type of the torch draft's matrices"},
    "--kept": {"type": int, "default": 32768, "help": "tokens of the draft's pruned vocabulary"},
    "--limit-s": {"type": float, "default": 540.0, "help": "skip later parts after this time"},
    "--model-dir": {"type": Path, "help": "folder to keep the written models in"},
    "--small": {"action": "store_true", "help": "tiny models, for slow devices"},
    "--dry-run-sim": {"action": "store_true", "help": "--small on the CPU posing as a GPU"},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("part", nargs="?", choices=list(PARTS), help="measure this alone")
    for flag, settings in FLAGS.items():
        parser.add_argument(flag, **settings)
    args = parser.parse_args()
    args.small |= args.dry_run_sim
    if args.small:
        args.batches, args.repetitions, args.threads = "4,16", 2, 1
        args.k, args.depth, args.kept = "1,4", 32, 128
    args.threads = args.threads or int(machine()["cores"] or 1)
    return args


def streaming(setting: Setting) -> bool:
    """Measure the link, run tests/gpu, and time steps beside llama.cpp's. True if all is equal."""
    setting.report["gpu_tests"] = tests = "left out with --small"
    if not setting.args.small:
        setting.report["gpu_tests"] = tests = run_gpu_tests(setting)
    setting.say(f"tests/gpu: {tests}")
    return steps.measure(setting) and "failed" not in tests


def draft(setting: Setting) -> bool:
    """Measure the draft in torch beside libllama's. True if both compute the same, or skipped."""
    from specoffload.session.draft_opening import check_device, torch_name

    is_wanted, on_gpu = setting.args.part == "draft", setting.choice.on_gpu
    try:
        if not (is_wanted or setting.args.small) and setting.left_s() < _DRAFT_S:
            raise DeviceUnavailable(f"{setting.left_s():.0f} s are left")
        device = torch_name(setting.choice.name if on_gpu else "cpu", on_gpu=on_gpu)
        check_device(device)
    except DeviceUnavailable as e:
        setting.report["draft"]["left_out"] = str(e)
        setting.say(f"the draft in torch is left out: {e}")
        return not is_wanted
    import draft as part  # needs torch

    return part.measure(setting, device)


PARTS: dict[str, Callable[[Setting], bool]] = {
    "streaming": streaming, "split": split.measure, "draft": draft,
}  # fmt: skip


def run_gpu_tests(setting: Setting) -> str:
    """Run tests/gpu in a process of its own. Returns pytest's last line."""
    if importlib.util.find_spec("pytest") is None:
        return "left out: pytest is not installed"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-o", "addopts=",
               "-o", "filterwarnings=default", "-p", "no:cacheprovider"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TESTS_S)
    except subprocess.TimeoutExpired:
        return f"failed: more than {_TESTS_S} s"
    lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            setting.say(line)
    return lines[-1] if done.returncode == 0 else f"failed: {lines[-1]}"


def main() -> int:
    args = arguments()
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    choice = choose_device("sim:bw=1GB/s" if args.dry_run_sim else args.device)
    if not choice.wrapped and not (args.part == "draft" and args.device == "cpu"):
        names = ", ".join(device.name for device in devices())
        out.print(f"no GPU here (ggml knows {names}): run this on a GPU, or with --dry-run-sim")
        return 2
    report: dict[str, Any] = {
        "device": choice.name, "machine": machine(), "commit": commit(),
        "dry_run": args.dry_run_sim, "link": {}, "gpu_tests": "", "model": {}, "steps": [],
        "split": [], "draft": {}, "aims": {}, "seconds": {}, "error": "", "ok": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model_dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        setting = Setting(args, choice, folder, report, out)
        setting.say(f"{choice.name}: {choice.description}")
        try:
            oks = []
            for name, part in PARTS.items():
                if args.part in (None, name):
                    oks.append(part(setting))
                    report["seconds"][name] = round(time.monotonic() - setting.start_s, 1)
            report["ok"] = all(oks)
        except Exception as e:  # the JSON object keeps what was measured before
            report["error"] = f"{type(e).__name__}: {e}"
            traceback.print_exc()
    aims = [{"aim": words, "met": met} for words, met in report["aims"].items()]
    show(out, "aims; a missed one does not fail the check", aims)
    out.print(json.dumps(report), soft_wrap=True, markup=False)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
