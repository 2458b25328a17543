"""Measures how long a short request waits for its first token beside a long prompt.

    scripts/lab/run short-beside-long MODEL.gguf [--tokens N] [--short N] [--at SHARE ...]
                                      [--repeats N] [flags of specoffload serve]

Starts the server with two slots. A first run times the long prompt alone. Then a client sends it
again, and another one asks for one token after a short prompt, when a share of that time has
passed. The numbers are the time to the short request's token, and the time that the long prompt
takes beside it.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import httpx

from lab.served import first_token_s, serving, vocabulary


def beside(
    client: httpx.Client, long: list[int], short: list[int], after_s: float
) -> tuple[float, float]:
    """Return the seconds to the first token of the short and of the long request."""
    found: list[float] = []
    reading = threading.Thread(target=lambda: found.append(first_token_s(client, long)))
    reading.start()
    time.sleep(after_s)
    if not reading.is_alive():
        raise SystemExit(f"the prompt was read within {after_s:.1f} s: give more --tokens")
    short_s = first_token_s(client, short)
    reading.join()
    return short_s, found[0]


def measured(client: httpx.Client, arguments: argparse.Namespace) -> list[str]:
    """Return the lines of the report."""
    n_letters = min(250, vocabulary(client))
    long = [(7 * i) % n_letters for i in range(arguments.tokens)]
    short = [(5 * i + 3) % n_letters for i in range(arguments.short)]
    first_token_s(client, short)
    alone_s = statistics.median(first_token_s(client, long) for _ in range(arguments.repeats))
    short_s = statistics.median(first_token_s(client, short) for _ in range(arguments.repeats))
    lines = [
        f"a prompt of {len(long)} tokens alone: {alone_s:.2f} s",
        f"a prompt of {len(short)} tokens alone: {short_s:.2f} s",
    ]
    for share in arguments.at:
        pairs = [beside(client, long, short, share * alone_s) for _ in range(arguments.repeats)]
        waits, longs = zip(*pairs, strict=True)
        lines.append(
            f"short one sent at {share:.0%}: first token after {statistics.median(waits):.2f} s"
            f" (most {max(waits):.2f}); the long one took {statistics.median(longs):.2f} s"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--at", type=float, nargs="+", default=[0.1, 0.5])
    arguments, flags = parser.parse_known_args()
    context = ("-c", str(2 * arguments.tokens), "-np", "2")
    with serving(arguments.model, *context, *flags) as client:
        lines = measured(client, arguments)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
