"""Plays cases of devices that only another build of the library has, in a process of its own.

The process has that build and reads a case from each line of its input. It writes the case's
faults, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from combinations.cases import Case

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 900.0  # a software driver compiles its kernels at their first use
# The venv of each device, the script that makes it, and variables of its processes.
DEVICES: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    # ggml leaves Vulkan devices that are a CPU alone unless they are named.
    "vulkan": (".venv-vulkan", "scripts/test-gpu", {"GGML_VK_VISIBLE_DEVICES": "0"}),
    # New memory is full of NaN, so that nothing passes because memory happens to be zero.
    "stand-in": (
        ".venv-cuda", "scripts/test-cuda",
        {"STANDIN_VRAM": "24G", "STANDIN_FILL": "255", "GGML_CUDA_REGISTER_HOST": "1"},
    ),
}  # fmt: skip


def why_not(device: str) -> str:
    """Why cases of this device cannot be played here, or an empty text."""
    if device not in DEVICES:
        return ""
    venv, script, _ = DEVICES[device]
    if not (ROOT / venv / "bin/python").exists():
        return f"no {venv}, which {script} makes"
    return "" if device != "stand-in" or _standin() else "the CUDA stand-in cannot be built here"


@lru_cache
def _standin() -> str:
    """The folder with the libraries of the CUDA stand-in. Empty if they cannot be built."""
    done = subprocess.run(
        [str(ROOT / "scripts/build-cuda-standin")], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    return done.stdout.strip().rpartition("\n")[2] if done.returncode == 0 else ""


class Elsewhere:
    """The process of one device. It is started for the first case, and again after it died."""

    def __init__(self, device: str, models: Path) -> None:
        self._device, self._models = device, models
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._ended()
        self._folder.cleanup()

    def faults_of(self, case: Case) -> list[str]:
        """A sentence for each property that did not hold."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(asdict(case)), file=process.stdin, flush=True)
        ready, _, _ = select.select([process.stdout], [], [], _TIMEOUT_S)
        line = process.stdout.readline() if ready else ""
        if line:
            faults: list[str] = json.loads(line)
            return faults
        if not ready:
            process.kill()
        code = self._ended()
        words = " ".join(self._log.read_text(errors="replace").split())[-400:]
        if not ready:
            return [f"no answer after {_TIMEOUT_S:.0f} s: {words}"]
        return [f"the process ended with code {code}: {words}"]

    def _ended(self) -> int:
        assert self._process is not None
        try:
            code = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._process = None
        return code

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            venv, _, variables = DEVICES[self._device]
            own = dict(variables)
            if self._device == "stand-in":
                folder = _standin()
                own |= {"LD_LIBRARY_PATH": folder, "LD_PRELOAD": f"{folder}/libcudart.so.13"}
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [str(ROOT / venv / "bin/python"), "-m", "combinations.elsewhere",
                     str(self._models)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    env={**os.environ, "GGML_NO_BACKTRACE": "1", **own},
                )  # fmt: skip
        return self._process


def _play_all(models: Path) -> None:
    """Play the case of each line of the input. What libraries print goes to standard error."""
    from combinations.play import faults_of  # a check of the venvs needs no library

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        found = json.loads(line)
        case = Case(found["table"], tuple((axis, name) for axis, name in found["values"]))
        print(json.dumps(faults_of(case, models)), file=answers, flush=True)


if __name__ == "__main__":
    _play_all(Path(sys.argv[1]))
