"""Measures what a shared secret costs a worker's client, on loopback.

    scripts/lab/run passage [MODEL.gguf] [--rounds N] [--tokens N]

Two workers of the same file run on the CPU, one with a secret and one without. By turns, a new
client opens each of them with its layers halved, and decodes tokens one at a time and prompts of
64 tokens. With a secret, the bytes pass through a port of the client's own process
(offload/remote/passage.py). The report has the medians over the rounds, and the range of their
ratios. The default model is a tiny one, whose decodes are short, so that the passage counts most.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from lab.options import engine_options
from lab.synth import write_preset
from lab.timing import by_turns, seconds
from offload.engine import open_engine
from offload.remote.address import Address, RemoteOptions, parse_address
from offload.remote.secret import Secret
from offload.times.min_batch import MinBatch

_SECRET = "a secret of this measurement"
_UBATCH = 64
Speeds = tuple[float, float]  # tokens per second of answers and of prompts


@contextmanager
def working(model: Path, secret: str) -> Iterator[Address]:
    """Run a worker on the CPU, with a secret unless it is empty."""
    command = [sys.executable, "-m", "specoffload", "worker", str(model), "--threads", "1",
               "--listen", "127.0.0.1:0", "--device", "cpu"]  # fmt: skip
    environment = {**os.environ, "SPECOFFLOAD_WITHOUT": "profile"}
    environment.pop("SPECOFFLOAD_RPC_SECRET", None)
    if secret:
        environment["SPECOFFLOAD_RPC_SECRET"] = secret
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            for line in process.stdout or ():
                if found := re.match(r"worker listening on (\S+)", line):
                    address = parse_address(found[1])
                    yield replace(address, secret=Secret.of(secret) if secret else None)
                    break
            else:
                raise SystemExit("the worker did not start")
        finally:
            process.terminate()


def speeds_of(model: Path, worker: Address, n_tokens: int) -> Speeds:
    """Open the model on this machine and the worker, and return the speeds of decodes."""
    options = engine_options(
        device="sim", remote=RemoteOptions((worker,)), min_batch=MinBatch(1, 1),
        tensor_split=(1.0, 1.0), n_ctx=1024, n_ubatch=_UBATCH, n_outputs=_UBATCH, n_threads=1,
        n_threads_batch=1,
    )  # fmt: skip
    with open_engine(model, options) as engine:
        rows, found = engine.sequences, []
        for n in (1, _UBATCH):
            tokens = [(13 * i) % engine.n_vocab for i in range(n)]
            for _ in range(3):  # graphs of this size are sent and prepared
                rows.extend(0, tokens, 1)
                rows.rewind(0, 0)

            def decodes(n: int = n, tokens: list[int] = tokens) -> None:
                for _ in range(n_tokens // n):
                    rows.extend(0, tokens, 1)
                    if n > 1:
                        rows.rewind(0, 0)

            found.append(n_tokens // n * n / seconds(decodes))
            rows.rewind(0, 0)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512, help="of each speed (default: 512)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_preset("qwen3-30b-a3b", Path(folder) / "tiny.gguf")
        with working(model, "") as plain, working(model, _SECRET) as proven:

            def speeds(worker: Address, _nth: int) -> Speeds:
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    return pool.submit(speeds_of, model, worker, options.tokens).result()

            workers = {"": plain, _SECRET: proven}
            found = by_turns(
                {secret: partial(speeds, worker) for secret, worker in workers.items()},
                options.rounds,
            )
    for which, (what, n) in enumerate((("answers", 1), (f"prompts of {_UBATCH}", _UBATCH))):
        without, with_one = ([each[which] for each in found[secret]] for secret in ("", _SECRET))
        ratios = [b / a for a, b in zip(without, with_one, strict=True)]
        fast, slow = statistics.median(without), statistics.median(with_one)
        print(
            f"{what}: {fast:,.0f} tokens/s without a secret, {slow:,.0f} with one, so "
            f"{1e6 * n * (1 / slow - 1 / fast):,.0f} µs more for each decode; ratios of "
            f"rounds {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
