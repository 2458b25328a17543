"""Ctrl-C ends a run with exit code 130 at any time: real processes, real signals."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.options import engine_options
from offload.engine import open_engine
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.callback import Pending, guard, pending_around

ROOT = Path(__file__).parents[2]
INSTALLED = """
import signal
from specoffload import ctrl_c
ctrl_c.install(signal.SIGINT, signal.SIGTERM)
ctrl_c.commands_begin()
"""
IN_A_CALLBACK = """
import ctypes, os, signal
from offload.ggml.library.callback import Pending, guard
entered = []
def press():
    if not entered:
        entered.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass  # the handler runs here
    return 7
thunk, _ = guard(ctypes.CFUNCTYPE(ctypes.c_int), Pending(), -1, press)
assert thunk() == 7
import time
try:
    time.sleep(30)  # nobody asks the guard
except KeyboardInterrupt:
    os._exit(130)
"""
IN_A_FINALISER = """
import os, signal, time
class Pressing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
thing = Pressing()
del thing
try:
    time.sleep(30)
except KeyboardInterrupt:
    os._exit(130)
"""
IN_C = """
import ctypes, os, signal, threading
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
lock(mutex)  # signals do not end it, as they do not end a computation
"""
BEFORE_ANY_COMMAND = """
import os, signal
from specoffload import ctrl_c
ctrl_c.install(signal.SIGINT, signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
for _ in range(1000): pass
"""


def result_of(code: str) -> tuple[int, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=25,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("code", "errors"),
    [
        (INSTALLED + IN_A_CALLBACK, ""),
        (INSTALLED + IN_A_FINALISER, ""),
        (INSTALLED + IN_C, "interrupted\n"),
        (BEFORE_ANY_COMMAND, "interrupted\n"),
    ],
    ids=["callback nobody asks", "finaliser", "in C", "imports of the commands"],
)
def test_an_interrupt_that_python_would_drop_is_raised_later_or_ends_the_process(
    code: str, errors: str
) -> None:
    assert result_of(code) == (130, errors)
    terminated = code.replace("signal.SIGINT)", "signal.SIGTERM)")
    terminated = terminated.replace("(signal.SIGTERM, signal.SIGTERM)", "(signal.SIGTERM)")
    terminated = terminated.replace("KeyboardInterrupt", "SystemExit").replace("130", "143")
    assert result_of(terminated) == (143, errors)


def test_an_interrupt_during_an_import_is_raised_behind_it(tmp_path: Path) -> None:
    (tmp_path / "pressing.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(1000): pass\n"
    )
    code = f"""
import os, sys, time
sys.path.insert(0, {str(tmp_path)!r})
import pressing
try:
    time.sleep(30)
except KeyboardInterrupt:
    os._exit(130 if pressing.os else 1)
"""
    assert result_of(INSTALLED + code) == (130, "")


def test_a_frame_knows_the_callback_that_it_runs_in() -> None:
    pending, seen = Pending(), []

    def look() -> None:
        seen.append(pending_around(sys._getframe()))

    thunk, _ = guard(ctypes.CFUNCTYPE(None), pending, None, look)
    thunk()
    look()
    assert seen == [pending, None]


def test_opening_an_engine_raises_what_came_inside_a_callback(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is pressed while libllama allocates the buffer of the weights."""
    place = HostBufferType._on_alloc

    def press(self: HostBufferType, buft: int, size: int) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return place(self, buft, size)

    monkeypatch.setattr(HostBufferType, "_on_alloc", press)
    with pytest.raises(KeyboardInterrupt):
        open_engine(tiny_moe, engine_options(device="sim", n_ctx=256))


@pytest.mark.slow
def test_no_ctrl_c_is_lost_across_a_run() -> None:
    """This makes few tries at long intervals. `scripts/lab/run ctrl-c` makes a hundred."""
    words = ["--tries", "6", "--first", "0.3", "--step", "0.6", "--within", "30"]
    done = subprocess.run(
        [sys.executable, "-m", "lab.ctrl_c", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 tries" in done.stdout
    codes = re.search(r"\b130: (\d+)", done.stdout)
    assert codes is not None
    assert int(codes[1]) >= 4, "a busy machine may not have come to the program in the first tries"
