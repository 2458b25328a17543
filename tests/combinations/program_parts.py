"""A server of the embedded model with the chat template of another family."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

_TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"
_START_S = 120.0


@contextmanager
def serving_family(family: str, *more: str) -> Iterator[str]:
    """Run `specoffload serve` with these words too, and yield its address.

    Raises AssertionError if it does not end well, or has printed a traceback.
    """
    words = [
        "serve", "--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--threads", "1",
        "--ctx-size", "4096", "--spec-type", "none", "--temp", "0",
        "--chat-template-file", str(_TEMPLATES / f"{family}.jinja"), *more,
    ]  # fmt: skip
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "specoffload", *words], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "SPECOFFLOAD_WITHOUT": "profile"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            yield _healthy(process, lines)
            process.terminate()
            assert process.wait(60) == 0, "".join(lines)
        finally:
            process.kill()
    reader.join(10)
    assert "Traceback" not in "".join(lines), "".join(lines)


def _healthy(process: subprocess.Popen[str], lines: list[str]) -> str:
    """Wait until the model is loaded. Returns the server's address."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"listening on (\S+)", "".join(lines)):
            try:
                if httpx.get(found[1] + "/health").status_code == 200:
                    return found[1]
            except httpx.TransportError:
                pass
        time.sleep(0.05)
    raise AssertionError("the server does not start:\n" + "".join(lines))
