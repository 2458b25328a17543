"""Measures the time to the first token of a long prompt: evaluated, from RAM, and from the disk.

    scripts/lab/run kept-prompts [--model MODEL.gguf] [--tokens N] [flags of specoffload serve]

Starts `serve --cache-disk` on a new folder. The prompt is evaluated, asked for again after another
prompt took its only slot (RAM), and asked for once more after the server was stopped and started
again (disk). The kernel's cached pages of the folder are dropped before that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from lab.served import first_token, serving
from lab.synth import write_preset

_SHAPE: dict[str, Any] = {
    "n_layer": 4, "n_embd": 2048, "n_ff_exp": 768, "n_expert": 64, "n_expert_used": 8,
    "n_vocab": 8192, "n_head": 32, "n_head_kv": 4, "n_ctx": 32768, "quant": "Q4_K_M",
}  # fmt: skip


def drop_pages(folder: Path) -> int:
    """Drop the kernel's cached pages of all files, and return their size in bytes."""
    n_bytes = 0
    for path in folder.glob("*.prompt"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            n_bytes += path.stat().st_size
    return n_bytes


def measured(model: Path, flags: list[str], folder: Path, n_tokens: int) -> list[str]:
    """Return the lines of the report."""
    drawn = Random(1)
    prompt, other = ([drawn.randrange(1, 250) for _ in range(n)] for n in (n_tokens, 300))
    with serving(str(model), *flags) as client:
        cold_s, _ = first_token(client, prompt, cache_prompt=True)
        first_token(client, other, cache_prompt=True)
        ram_s, ram = first_token(client, prompt, cache_prompt=True)
        began = time.perf_counter()
    stop_s = time.perf_counter() - began
    n_bytes = drop_pages(folder)
    with serving(str(model), *flags) as client:
        disk_s, disk = first_token(client, prompt, cache_prompt=True)
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
        own = [
            *("-c", str(arguments.tokens + 4096), "-np", "1", "--spec-type", "none"),
            *("--cache-disk", f"20GiB,{folder}", *flags),
        ]
        lines = measured(model, own, folder, arguments.tokens)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
