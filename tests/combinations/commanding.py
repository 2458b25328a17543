"""Runs the command of a case as a process, and checks what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from combinations.cases import Case
from combinations.kept_times import disturb, spoilt_times
from combinations.play import busy
from combinations.program_parts import Output, serving
from combinations.slow_flags import slow_flags_unsaid
from combinations.small_models import large_model_of, model_of, n_layers_in_ram

_TIMEOUT_S = 300
_MEASURE_S = {"briefly": 0.2, "at length": 3.0}  # most seconds of a first start's measurement
# Figures that mean nothing: not a number, or an uncertainty larger than the value.
_EMPTY_FIGURE = re.compile(r"\bnan\b|\binf\b|± *[0-9]{3,} *%|\? ×", re.IGNORECASE)
_TOO_BUSY = "try again when the machine is idle"
_JSON = ("plan as JSON",)
_ELSEWHERE = ("plan elsewhere",)
# A module that Python imports at its start. The clock is 55 years slow.
_WRONG_CLOCK = """
import datetime, time
right, slow_s = time.time, 55 * 365 * 86400
class Slow(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) - datetime.timedelta(seconds=slow_s)
Slow.__module__, Slow.__qualname__ = "datetime", "datetime"
datetime.datetime = Slow
time.time = lambda: right() - slow_s
time.time_ns = lambda: int(time.time() * 1e9)
"""


def faults_of(case: Case, models: Path) -> list[str]:
    """Run the case's command. Returns a sentence for each property that did not hold."""
    with tempfile.TemporaryDirectory() as folder, busy(case["machine"] == "busy"):
        try:
            return [*_Run(case, models, Path(folder)).faults()]
        except (AssertionError, httpx.HTTPError, subprocess.TimeoutExpired) as e:
            return [f"raised: {type(e).__name__}: {e}"]


def words_of(case: Case, models: Path, *, left_out: tuple[str, ...] = ()) -> list[str]:
    """The command's words, without the program's name and without the flags of some axes."""
    own = case.value("command").words
    n = 2 if own[:2] == ("tune", "numa") else 1
    axes = [axis for axis, _ in case.values if axis not in ("command", *left_out)]
    rest = [word for axis in axes for word in case.value(axis).words]
    if case["machine"] == "idle" and case["command"] != "tune numa":  # that one chooses threads
        rest += ["--threads", "1"]
    elsewhere = case["command"] in _ELSEWHERE
    model = (large_model_of if elsewhere else model_of)(case["memory"], models)
    filled = {
        "{ram}": str(model.stat().st_size // 2),
        "{layers}": str(n_layers_in_ram(case["memory"], is_large=elsewhere)),
        "{minutes}": str(_MEASURE_S[case["measures"]] / 30 + 0.01),
    }
    words = [*own[:n], str(model), *own[n:], *rest]
    return [filled.get(word, word) for word in words]


class _Run:
    """A case's runs, and the folder in which they keep measurements."""

    def __init__(self, case: Case, models: Path, folder: Path) -> None:
        self._case, self._models, self._folder = case, models, folder
        self._kept = folder / "kept"
        self._kept.mkdir()
        self._n_ctx = 0  # tokens of the context that the last plan chose

    def faults(self) -> Iterator[str]:
        case = self._case
        words = words_of(case, self._models)
        kept = self._prepared(words)
        before = self._folder / "before"
        shutil.copytree(self._kept, before)
        done = self._done(words, kept)
        output = done.out + done.err
        is_too_busy = _TOO_BUSY in " ".join(output.split())  # lines may be broken anywhere
        if done.code != 0 and is_too_busy and case["command"] == "tune numa":
            return  # no time was steady, and it keeps nothing
        if done.code != 0:
            yield f"exit code {done.code}: {' '.join(output.split())[-300:]}"
        if "Traceback" in output:
            yield f"a traceback: {output[-300:]}"
        if found := _EMPTY_FIGURE.search(output):
            yield f"a figure that means nothing: {_line_of(output, found.start())}"
        if case["command"] in _JSON:
            try:
                json.loads(done.out)
            except ValueError:
                yield f"no JSON: {done.out[:200]!r}"
        if done.code == 0:
            yield from slow_flags_unsaid(
                case, lambda left_out: self._plan(left_out, before), output
            )
            yield from spoilt_times(self._kept)

    def _prepared(self, words: list[str]) -> Path:
        """Do what an earlier start did. Returns the folder that the run is to use."""
        start = self._case["start"]
        if start != "first":
            self._done(words, self._kept, is_earlier=True)
        if start == "disturbed":
            disturb(self._kept)
        if start == "damaged":
            for path in self._kept.rglob("*.json"):
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        if start == "read-only":
            return Path("/proc/specoffload")  # no folder can be made there, not even by root
        return self._kept

    def _plan(self, left_out: tuple[str, ...], kept: Path) -> Mapping[str, float]:
        """Speeds that `plan` expects of the case without the flags of some axes.

        The first call is with all flags. Later ones are for the same context.
        """
        command = self._case["command"]
        plan = command if command in _ELSEWHERE else "plan"
        words = words_of(self._case.replaced("command", plan), self._models, left_out=left_out)
        if left_out:  # other flags would choose another context
            words += ["--ctx-size", str(self._n_ctx)]
        planned = json.loads(self._done([*words, "--json"], kept).out)
        self._n_ctx = planned["ctx_size"]
        found: Mapping[str, float] = planned["expected"]
        return found

    def _done(self, words: list[str], kept: Path, *, is_earlier: bool = False) -> Output:
        """Run the program to its end, a server after one request."""
        case = self._case
        environment = {
            **os.environ, "SPECOFFLOAD_PROFILE_DIR": str(kept), "NO_COLOR": "1", "COLUMNS": "120",
            "SPECOFFLOAD_MEASURE_S": str(_MEASURE_S[case["measures"]]),
        }  # fmt: skip
        program = [sys.executable, "-m", "specoffload", *words]
        if case["machine"] == "one processor":
            program = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *program]
        if case["machine"] == "wrong clock" and not is_earlier:
            (self._folder / "sitecustomize.py").write_text(_WRONG_CLOCK)
            path = f"{self._folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            environment["PYTHONPATH"] = path
        if words[0] == "serve":
            return _served([*program, "--host", "127.0.0.1", "--port", "0"], environment)
        done = subprocess.run(
            program, input="def f(x):\n", capture_output=True, text=True, env=environment,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        return Output(done.returncode, done.stdout, done.stderr)


def _served(program: list[str], environment: dict[str, str]) -> Output:
    """Start a server, send one request, and stop it."""
    with serving(program, environment) as served:
        if served.url:
            body = {"prompt": "def f", "n_predict": 4}
            answer = httpx.post(served.url + "/completion", json=body, timeout=_TIMEOUT_S)
            assert answer.status_code == 200, answer.text
    return served.output


def _line_of(text: str, at: int) -> str:
    start = text.rfind("\n", 0, at) + 1
    return text[start : text.find("\n", at)].strip()
