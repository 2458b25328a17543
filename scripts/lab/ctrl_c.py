"""Presses Ctrl-C at many moments of a run, and reports each one that was ignored or too slow.

    scripts/lab/run ctrl-c                        # 100 tries, 50 ms apart
    scripts/lab/run ctrl-c --tries 20 --step 0.3 -- MODEL.gguf -p hello
    scripts/lab/run ctrl-c -- --device sim -f LONG.txt

The words after `--` go to `specoffload run`. Without any, the embedded pair runs on `sim`, whose
callbacks are all in Python. Each run measures a profile, so the moments lie in imports, opening,
profiling and decoding. A try passes if the program exits with 130 within `--within`
seconds and prints no exception. Tries before the program's first line are counted separately,
because the interpreter itself handles Ctrl-C then.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from lab import ROOT

WORDS = ("def f(n):", "-n", "100000", "--ignore-eos", "--device", "sim", "-c", "32768")
NOISE = ("Traceback", "Exception ignored", "Fatal")


@dataclass(frozen=True)
class Try:
    """One Ctrl-C: when it was pressed, and how the program ended."""

    at_s: float
    exit_code: int | None  # None if the program had to be killed
    took_s: float
    errors: str
    ended_before: bool

    @property
    def too_early(self) -> bool:
        """True if the interpreter had not reached the program's own code."""
        return "KeyboardInterrupt" in self.errors and str(ROOT) not in self.errors

    def bad(self, within_s: float) -> str:
        """Return why this try failed, or "" if it passed."""
        if self.ended_before:
            return "the run had ended already"
        if self.too_early:
            return ""
        if self.exit_code is None:
            return f"went on for {within_s:.0f} s more"
        if self.exit_code != 130:
            return f"exit code {self.exit_code}"
        noise = [word for word in NOISE if word in self.errors]
        return f"says {noise[0]!r}" if noise else ""


def press(words: list[str], at_s: float, within_s: float) -> Try:
    """Start a run, press Ctrl-C after `at_s` seconds, and wait up to `within_s` for its end."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "specoffload", "run", *words],
            env={**os.environ, "PYTHONPATH": path, "SPECOFFLOAD_PROFILE_DIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        time.sleep(at_s)
        ended_before = process.poll() is not None
        process.send_signal(signal.SIGINT)
        began_s = time.perf_counter()
        try:
            code: int | None = process.wait(within_s)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        took_s = time.perf_counter() - began_s
        errors.seek(0)
        return Try(at_s, code, took_s, errors.read().decode(errors="replace"), ended_before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--step", type=float, default=0.05, help="seconds between two moments")
    parser.add_argument("--first", type=float, default=0.1, help="seconds after the start")
    parser.add_argument(
        "--within", type=float, default=1.0, help="seconds until it must have ended"
    )
    parser.add_argument("words", nargs="*", help="of `specoffload run`, behind --")
    asked = parser.parse_args()
    tries = []
    for i in range(asked.tries):
        one = press(asked.words or list(WORDS), asked.first + i * asked.step, asked.within)
        tries.append(one)
        if bad := one.bad(asked.within):
            print(f"{one.at_s:6.2f} s: {bad}\n{one.errors[-600:]}", flush=True)
    codes = collections.Counter(one.exit_code for one in tries)
    n_early = sum(one.too_early for one in tries)
    took_s = sorted(one.took_s for one in tries)
    print(
        f"{len(tries)} tries ({n_early} before the program) from {tries[0].at_s:.2f} to "
        f"{tries[-1].at_s:.2f} s: exit codes "
        f"{dict(codes)}, ended within {took_s[len(took_s) // 2]:.2f} s (median), "
        f"{took_s[-1]:.2f} s (slowest)"
    )
    return any(one.bad(asked.within) for one in tries)


if __name__ == "__main__":
    sys.exit(main())
