"""Runs tests/gpu with a live log, and ends at the first failure."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from needed import ROOT
from setting import Setting
from timed_parts import LeftOut

_LEAST_S = 20.0


def measure(setting: Setting) -> bool:
    """Fill `gpu_tests` of the report with pytest's last line. True if no test failed."""
    report = setting.report
    if setting.args.small:
        report["gpu_tests"] = "left out with --small"
        raise LeftOut("--small")
    if importlib.util.find_spec("pytest") is None:
        report["gpu_tests"] = "left out: pytest is not installed"
        raise LeftOut("pytest is not installed")
    setting.least_s(_LEAST_S)
    last, n_passed = "no output", 0
    with subprocess.Popen(command(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          cwd=ROOT) as run:  # fmt: skip
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
            if " PASSED" in line or line.startswith("PASSED"):
                n_passed += 1
                report["gpu_tests"] = f"{n_passed} passed so far"
                setting.save()
    report["gpu_tests"] = last if run.returncode == 0 else f"failed: {last}"
    return run.returncode == 0


def command() -> list[str]:
    """The call of pytest. Its plugins may be missing, so their settings are left out."""
    return [sys.executable, "-u", "-m", "pytest", "tests/gpu", "-v", "-x", "--tb=short",
            "-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]  # fmt: skip
