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
from functools import partial
from pathlib import Path

import httpx

from lab.served import serving, serving_all
from lab.timing import by_turns, seconds


def first_token_s(client: httpx.Client, model: str) -> float:
    """Return the seconds until a model's first token after a short prompt."""
    body = {"model": model, "prompt": "one two", "n_predict": 1, "cache_prompt": False}
    return seconds(lambda: client.post("/completion", json=body).raise_for_status())


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
    files = dict(zip(names, arguments.models, strict=True))

    def own_start(name: str, _nth: int) -> float:
        return own_start_s(files[name], flags)

    own = by_turns({name: partial(own_start, name) for name in names}, arguments.repeats)
    with serving_all(arguments.models, *flags) as client:

        def switch(name: str, _nth: int) -> float:
            return first_token_s(client, name)

        ways = {name: partial(switch, name) for name in names}
        switched = by_turns(ways, arguments.repeats, n_warm=1)  # each is opened once
    for name in names:
        for what, found in (("own server", own[name]), ("switch", switched[name])):
            median = statistics.median(found)
            print(f"{name}, {what}: median {median:.2f} s ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
