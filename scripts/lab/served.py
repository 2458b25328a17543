"""Starts `specoffload serve` for a measurement, and times its first tokens."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx

PATIENCE_S = 1800.0


def serving(model: str, *flags: str) -> AbstractContextManager[httpx.Client]:
    """Serve a model until the block ends. Yields a client of the server, which is ready."""
    return _serving("-m", model, *flags)


def serving_all(models: Sequence[str], *flags: str) -> AbstractContextManager[httpx.Client]:
    """Serve several models, of which requests name one. Yields a client of the server."""
    return _serving(*models, *flags)


@contextmanager
def _serving(*words: str) -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "specoffload", "serve", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if "listening on" in line).split()[-1]
        # A full pipe would block the server: it holds about 700 lines of requests.
        threading.Thread(target=server.stdout.read, daemon=True).start()
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
                while client.get("/health").status_code != 200:
                    time.sleep(0.2)
                yield client
            server.send_signal(signal.SIGTERM)
            server.wait(PATIENCE_S)
        finally:
            server.kill()


def vocabulary(client: httpx.Client) -> int:
    """Return the number of tokens that the served model knows."""
    return int(client.get("/v1/models").json()["data"][0]["meta"]["n_vocab"])


def first_token(
    client: httpx.Client, prompt: list[int], *, cache_prompt: bool
) -> tuple[float, dict[str, Any]]:
    """Return the seconds until the first token after `prompt`, and the server's timings."""
    began = time.perf_counter()
    body = {"prompt": prompt, "n_predict": 1, "cache_prompt": cache_prompt}
    answer = client.post("/completion", json=body)
    answer.raise_for_status()
    return time.perf_counter() - began, answer.json()["timings"]


def first_token_s(client: httpx.Client, prompt: list[int]) -> float:
    """Return the seconds until the first token after `prompt`, none of which is cached."""
    return first_token(client, prompt, cache_prompt=False)[0]
