"""Run `specoffload serve` as its own process, for tests that need a real model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import openai
from running import eventually, http

SERVE = [
    sys.executable,
    "-m",
    "specoffload",
    "serve",
    *("--temp", "0"),
    "--port",
    "0",
    "--ctx-size",
    "512",
    "--threads",
    "1",
]
# Drafts have a fixed length of 4 tokens. The default policy's lengths depend on measured times.
ENVIRONMENT = {**os.environ, "SPECOFFLOAD_WITHOUT": "profile"}


class Program:
    """The running program; `url` ends without a slash."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = self._address()
        eventually(lambda: http.get(self.url + "/health").status_code == 200, 60)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)

    def _address(self) -> str:
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            _, found, url = line.partition("listening on ")
            if found:
                return url.strip()
        raise AssertionError("no address line:\n" + "".join(seen))


@contextmanager
def serving(
    *flags: str,
    environment: dict[str, str] | None = None,
    entry: Sequence[str] = ("-m", "specoffload"),
) -> Iterator[Program]:
    """Run SERVE with more flags. If a flag occurs twice, the later value counts.

    `entry`: the words after Python's name that start the program.
    """
    with subprocess.Popen(
        [sys.executable, *entry, *SERVE[SERVE.index("serve") :], *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, **(environment or {})},
    ) as process:
        try:
            yield Program(process)
        finally:
            process.terminate()
            process.communicate(timeout=30)
