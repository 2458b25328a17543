"""Requests about what a server keeps (responses, streams, salts), and lists that are long."""

from __future__ import annotations

import random
from typing import Any

from lab.attack.client import Request, ask_for

_HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
_HOSTILE: tuple[Any, ...] = (
    "",
    "\0",
    "x" * 2000,
    "../../etc/passwd",
    "resp_" + "0" * 32,
    "é" * 500,
    None,
    7,
    [],
    {},
)


def stored(rng: random.Random) -> Request:
    """Name responses and items that are unknown, damaged, repeated or not text."""
    name = rng.choice(_HOSTILE)
    n = rng.choice((1, 1000, 20_000))
    item = {"type": "item_reference", "id": name}
    body: dict[str, Any] = rng.choice(
        (
            {"input": "a", "previous_response_id": name},
            {"input": [item] * n},
            {"input": [{"role": "user", "content": "a"}, item], "store": rng.choice((True, name))},
            {"input": "x" * rng.choice((10, 200_000)), "store": True},
            {"input": [{"type": "function_call_output", "call_id": name, "output": "a"}] * n},
        )
    )
    return ask_for("/v1/responses", {**body, "max_output_tokens": 1})


def stream(rng: random.Random) -> Request:
    """Keep, read and end streams by names of all kinds."""
    names = ("a" * 22, "b" * 64, "c" * 65, "a", "../x" * 8, "%00" * 10, f"{rng.randrange(9):022}")
    name = rng.choice(names)
    method = rng.choice(("GET", "DELETE", "POST"))
    if method == "POST":
        headers = {"X-Stream-Id": name}
        return ask_for("/v1/chat/completions", {**_HI, "stream": True}, **headers)
    return Request(f"/v1/streams/{name}", method=method)


def salted(rng: random.Random) -> Request:
    salt = rng.choice((*_HOSTILE, "s" * 1024, "s" * 1025, f"{rng.random()}"))
    return ask_for("/v1/chat/completions", {**_HI, "cache_salt": salt})


def long_lists(rng: random.Random) -> Request:
    """Stops, biases and patterns without end."""
    n = rng.choice((4, 1000, 50_000))
    body: dict[str, Any] = rng.choice(
        (
            {"stop": [f"{rng.random()}" for _ in range(n)]},
            {"stop": ["a" * n] * 4},
            {"logit_bias": {str(i): rng.choice((-100, 1e308, "x", False)) for i in range(n)}},
            {"logit_bias": [[i, -1] for i in range(n)]},
            {"logit_bias": [["a" * n, 1.0]]},
            {"grammar": f"root ::= {'(' * (n // 100)}[a-z]{')' * (n // 100)}{{1,{n}}}"},
            {"grammar": "root ::= " + " | ".join(f'"{i}"' for i in range(n))},
            {"json_schema": {"type": "string", "pattern": f"^({'a?' * (n // 20)}){{1,50}}$"}},
            {"json_schema": {"enum": list(range(n))}},
            {"dry_multiplier": 1.0, "dry_sequence_breakers": ["a" * 100] * n},
            {"samplers": ["top_k"] * n},
            {"n": n},
            {"top_logprobs": n, "logprobs": True},
        )
    )
    return ask_for("/v1/chat/completions", {**_HI, "max_tokens": 4, **body})
