"""Measures how long a request waits while a server switches between two models.

    scripts/lab/run switched ONE.gguf TWO.gguf [--repeats N] [flags of specoffload serve]

For each model, times its own server from its start to the first token. Then one server has both
models, of which one is open at a time. Times each request for the model that is not open, from the
request to its first token. Before, every model is opened once, so both are known.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import httpx

from lab.served import serving, serving_all


def first_token_s(client: httpx.Client, model: str) -> float:
    """Return the seconds until a model's first token after a short prompt."""
    began = time.perf_counter()
    body = {"model": model, "prompt": "one two", "n_predict": 1, "cache_prompt": False}
    client.post("/completion", json=body).raise_for_status()
    return time.perf_counter() - began


def own_start_s(file: str, flags: list[str]) -> float:
    """Return the seconds from the start of a model's own server to its first token."""
    began = time.perf_counter()
    with serving(file, *flags) as client:
        first_token_s(client, Path(file).stem)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments, flags = parser.parse_known_args()
    names = [Path(file).stem for file in arguments.models]
    own: dict[str, list[float]] = {name: [] for name in names}
    switched: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.repeats):
        for name, file in zip(names, arguments.models, strict=True):
            own[name].append(own_start_s(file, flags))
    with serving_all(arguments.models, *flags) as client:
        for turn in range(arguments.repeats + 1):
            for name in names:
                seconds = first_token_s(client, name)
                if turn:  # each was opened once
                    switched[name].append(seconds)
    for name in names:
        for what, found in (("own server", own[name]), ("switch", switched[name])):
            median = statistics.median(found)
            print(f"{name}, {what}: median {median:.2f} s ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
