"""Measures how long the next client waits after one has left in the middle of a long prompt.

    scripts/lab/run cancelled MODEL.gguf [--tokens N] [--repeats N] [--at SHARE]
                              [flags of specoffload serve]

Starts the server with one slot and a ubatch of the whole prompt. A first run times the prompt.
Then a client sends it and leaves after a share of that time, and another client asks for one
token. The numbers are the times from the first client's leaving to the other one's token. The same
is measured without the first client.
"""

from __future__ import annotations

import argparse
import statistics

import httpx

from lab.served import first_token_s, serving, vocabulary


def leave_after(client: httpx.Client, prompt: list[int], seconds: float) -> None:
    """Send a prompt, and hang up after `seconds`."""
    body = {"prompt": prompt, "n_predict": 1, "cache_prompt": False}
    try:
        client.post("/completion", json=body, timeout=seconds)
    except httpx.ReadTimeout:
        return
    raise SystemExit(f"the prompt was read within {seconds:.1f} s: give more --tokens")


def measured(client: httpx.Client, n_tokens: int, repeats: int, share: float) -> list[str]:
    """Return the lines of the report."""
    short = [5, 6, 7, 8]
    n_ids = min(250, vocabulary(client))
    prompt = [(7 * i) % n_ids for i in range(n_tokens)]
    first_token_s(client, short)
    whole_s = first_token_s(client, prompt)
    alone = [first_token_s(client, short) for _ in range(repeats)]
    after = []
    for _ in range(repeats):
        leave_after(client, prompt, share * whole_s)
        after.append(first_token_s(client, short))
    return [
        f"a prompt of {n_tokens} tokens: {whole_s:.2f} s",
        f"first token of 4 tokens, alone: median {statistics.median(alone):.2f} s",
        f"after a client left at {share:.0%} of the prompt: median "
        f"{statistics.median(after):.2f} s, most {max(after):.2f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at", type=float, default=0.3)
    arguments, own = parser.parse_known_args()
    size = str(arguments.tokens)
    flags = [*("-c", str(2 * arguments.tokens), "-b", size, "-ub", size, "-np", "1"), *own]
    with serving(arguments.model, *flags) as client:
        lines = measured(client, arguments.tokens, arguments.repeats, arguments.at)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
