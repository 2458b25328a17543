"""SIGTERM ends every command, also as process 1 of a container, which ignores it by default."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, serving

ROOT = Path(__file__).parents[2]
IN_ITS_OWN_SPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
DEMO = str(ROOT / "specoffload/demo/target.gguf")


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*IN_ITS_OWN_SPACE, "true"], capture_output=True).returncode == 0


as_process_1 = pytest.mark.skipif(not _can_unshare(), reason="new PID namespaces need root")


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {"slow-Q4_K_M.gguf": b"GGUF" + bytes(1 << 20)}
    with serving(Hub({"maker/slow-GGUF": files}, stalls_after=1000)) as made:
        yield made


def _environment(hub: Hub | None, tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LLAMA_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {} if hub is None else {"HF_ENDPOINT": hub.url}
    return {**kept, **more, "PYTHONPATH": path, "HF_HOME": str(tmp_path / "hf")}


def _child(pid: int) -> int:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        if words := Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
            return int(words[0])
        time.sleep(0.01)
    raise AssertionError("no process 1")


@as_process_1
@pytest.mark.parametrize("words", [("serve", "--port", "0"), ("run", "-p", "x"), ("plan",)])
def test_process_1_ends_in_the_middle_of_a_download(
    words: tuple[str, ...], hub: Hub, tmp_path: Path
) -> None:
    command = [*IN_ITS_OWN_SPACE, sys.executable, "-m", "specoffload", *words]
    command += ["-hf", "maker/slow-GGUF"]
    with subprocess.Popen(
        command, env=_environment(hub, tmp_path), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as begun:  # fmt: skip
        assert hub.is_stalled.wait(60)
        os.kill(_child(begun.pid), signal.SIGTERM)
        _, said = begun.communicate(timeout=60)
    assert begun.returncode == 143
    assert "Traceback" not in said


@as_process_1
@pytest.mark.parametrize(
    "words",
    [
        (
            *(
                "run",
                "-m",
                DEMO,
                "-no-cnv",
                "-p",
                "def f(",
                "-n",
                "-1",
                "--ignore-eos",
                "-dev",
                "cpu",
            ),
            *("-c", "65536", "--spec-type", "none"),
        ),
        ("bench", DEMO, "-r", "1000"),
        ("doctor",),
    ],
)
@pytest.mark.parametrize("delay_s", [0.05, 0.5, 3.0])
def test_process_1_ends_at_any_time(words: tuple[str, ...], delay_s: float, tmp_path: Path) -> None:
    command = [*IN_ITS_OWN_SPACE, sys.executable, "-m", "specoffload", *words]
    with subprocess.Popen(
        command, env=_environment(None, tmp_path), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as begun:  # fmt: skip
        child = _child(begun.pid)
        while b"specoffload" not in (line := Path(f"/proc/{child}/cmdline").read_bytes()):
            assert begun.poll() is None, line
        handled = 0
        while not handled & 1 << (signal.SIGTERM - 1):  # until the program's first lines have run
            status = Path(f"/proc/{child}/status").read_text(encoding="utf-8")
            handled = int(status.partition("SigCgt:")[2].split()[0], 16)
        time.sleep(delay_s)
        if begun.poll() is None:
            os.kill(child, signal.SIGTERM)
        _, said = begun.communicate(timeout=60)
    ended_first = words == ("doctor",) and begun.returncode in (0, 1)
    assert begun.returncode == 143 or ended_first, said
    assert "Traceback" not in said


def test_another_process_ends_with_the_same_code_and_its_children_too(
    hub: Hub, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "specoffload", "run", "-p", "x", "-hf", "maker/slow-GGUF"]
    with subprocess.Popen(
        command, env=_environment(hub, tmp_path), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as begun:  # fmt: skip
        assert hub.is_stalled.wait(60)
        begun.terminate()
        _, said = begun.communicate(timeout=60)
    assert begun.returncode == 143
    assert "Traceback" not in said
