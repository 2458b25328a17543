"""Servers as processes: with any words, or with the chat template of another family."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

_TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"
_START_S = 400.0  # a machine that others use is slow


@dataclass(frozen=True)
class Output:
    """What a program printed, and its exit code."""

    code: int
    out: str
    err: str = ""


@dataclass
class Served:
    """A server that runs, and after its end its output. `url` is empty if it did not start."""

    url: str = ""
    lines: list[str] = field(default_factory=list)
    code: int = -1

    @property
    def output(self) -> Output:
        """The output. Call it after the end."""
        return Output(self.code, "".join(self.lines))


@contextmanager
def serving(program: list[str], environment: dict[str, str]) -> Iterator[Served]:
    """Run a server until the block ends, and stop it by SIGTERM."""
    served = Served()
    with subprocess.Popen(
        program, text=True, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(target=served.lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            served.url = _healthy(process, served.lines)
            yield served
            process.terminate()
            process.wait(60)
        finally:
            process.kill()
            served.code = process.wait()
            reader.join(10)


@contextmanager
def serving_family(family: str, *more: str) -> Iterator[str]:
    """Serve the embedded model with a family's template and these words. Yields its address.

    Raises AssertionError if it does not start, does not end well, or has printed a traceback.
    """
    words = [
        "serve", "--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--threads", "1",
        "--ctx-size", "4096", "--spec-type", "none", "--temp", "0",
        "--chat-template-file", str(_TEMPLATES / f"{family}.jinja"), *more,
    ]  # fmt: skip
    environment = {**os.environ, "SPECOFFLOAD_WITHOUT": "profile"}
    with serving([sys.executable, "-m", "specoffload", *words], environment) as served:
        assert served.url, f"the server does not start:\n{served.output.out}"
        yield served.url
    assert served.code == 0, served.output.out
    assert "Traceback" not in served.output.out, served.output.out


def _healthy(process: subprocess.Popen[str], lines: list[str]) -> str:
    """Wait until the model is loaded. Returns the server's address, or "" if it ended before.

    Raises AssertionError if it takes too long.
    """
    deadline = time.monotonic() + _START_S
    while process.poll() is None:
        assert time.monotonic() < deadline, "the server does not start:\n" + "".join(lines)
        if found := re.search(r"listening on (\S+)", "".join(lines)):
            try:
                if httpx.get(found[1] + "/health").status_code == 200:
                    return found[1]
            except httpx.TransportError:
                pass
        time.sleep(0.05)
    return ""
