"""Measures the time to the first token of a long prompt: evaluated, from RAM, and from the disk.

    scripts/lab/run kept-prompts [--model MODEL.gguf] [--tokens N] [flags of specoffload serve]

Starts `serve --cache-disk` on a new folder. The prompt is evaluated, asked for again after another
prompt took its only slot (RAM), and asked for once more after the server was stopped and started
again (disk). The kernel's cached pages of the folder are dropped before that.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from lab.synth import write_preset

_PATIENCE_S = 1800.0
_SHAPE: dict[str, Any] = {
    "n_layer": 4, "n_embd": 2048, "n_ff_exp": 768, "n_expert": 64, "n_expert_used": 8,
    "n_vocab": 8192, "n_head": 32, "n_head_kv": 4, "n_ctx": 32768, "quant": "Q4_K_M",
}  # fmt: skip


@contextmanager
def serving(command: list[str]) -> Iterator[httpx.Client]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if "listening on" in line).split()[-1]
        try:
            with httpx.Client(base_url=url, timeout=_PATIENCE_S) as client:
                while client.get("/health").status_code != 200:
                    time.sleep(0.2)
                yield client
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=_PATIENCE_S)
        finally:
            server.kill()


def first_token_s(client: httpx.Client, prompt: list[int]) -> tuple[float, dict[str, Any]]:
    """Return the seconds until the first token after `prompt`, and the server's timings."""
    began = time.perf_counter()
    answer = client.post("/completion", json={"prompt": prompt, "n_predict": 1})
    answer.raise_for_status()
    return time.perf_counter() - began, answer.json()["timings"]


def drop_pages(folder: Path) -> int:
    """Drop the kernel's cached pages of all files, and return their size in bytes."""
    n_bytes = 0
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            n_bytes += path.stat().st_size
    return n_bytes


def measured(command: list[str], folder: Path, n_tokens: int) -> list[str]:
    """Return the lines of the report."""
    drawn = Random(1)
    prompt, other = ([drawn.randrange(1, 250) for _ in range(n)] for n in (n_tokens, 300))
    with serving(command) as client:
        cold_s, _ = first_token_s(client, prompt)
        first_token_s(client, other)
        ram_s, ram = first_token_s(client, prompt)
        began = time.perf_counter()
    stop_s = time.perf_counter() - began
    n_bytes = drop_pages(folder)
    with serving(command) as client:
        disk_s, disk = first_token_s(client, prompt)
    return [
        f"first token of {n_tokens} tokens, evaluated: {cold_s:.2f} s",
        f"from RAM: {ram_s:.3f} s ({ram['cache_n']} tokens), {cold_s / ram_s:.0f} times faster",
        f"from the disk after a restart: {disk_s:.3f} s ({disk['cache_disk_n']} tokens, files of "
        f"{n_bytes / 2**20:.0f} MiB), {cold_s / disk_s:.0f} times faster",
        f"stopping, which writes the prompts: {stop_s:.1f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    arguments, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "prompts"
        model = arguments.model
        if model is None:
            model = write_preset("qwen3moe", Path(place) / "m.gguf", seed=1, **_SHAPE)
        command = [
            *(sys.executable, "-m", "specoffload", "serve", "-m", str(model), "--port", "0"),
            *("-c", str(arguments.tokens + 4096), "-np", "1", "--spec-type", "none"),
            *("--cache-disk", f"20GiB,{folder}", *flags),
        ]
        lines = measured(command, folder, arguments.tokens)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
