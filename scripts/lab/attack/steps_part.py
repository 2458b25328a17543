"""Sends requests whose steps multiply, while a normal client checks that it does not wait.

Each kind has a size that the seed chooses: schemas with references, choices and patterns,
conversations of many calls, bodies beside the queue, compressed bodies, long lists, and names of
responses, streams and salts.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.attack import ATTACK
from lab.attack.bystander import CHAT, HI, bystander
from lab.attack.client import NoAnswer, Request, ask_for, send
from lab.attack.http_part import SERVE
from lab.attack.kept_requests import long_lists, salted, stored, stream
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import Program, bad_lines, serving

_N_AT_ONCE = 6
_PATIENCE_S = 60.0
_PAUSE_S = 0.1
_MOST_BYTES = 1 << 30  # resident, of the server with its engine

Body = dict[str, Any]


def _schema(rng: random.Random) -> Body:
    n = rng.choice((300, 1000, 3000))
    target = {"$anchor": "m", "type": "object", "properties": {"q": {"type": "string"}}}
    named: dict[str, Body] = {"last": target}
    ref = {"$ref": rng.choice(("#m", "#/$defs/last"))}
    if rng.random() < 0.5:  # a chain of references
        depth = rng.randint(2, 150)
        for at in range(depth):
            named[f"c{at}"] = {"$ref": f"#/$defs/c{at + 1}"} if at + 1 < depth else ref
        ref = {"$ref": "#/$defs/c0"}
    word = rng.choice(("properties", "allOf", "anyOf", "oneOf", "prefixItems", "dependentSchemas"))
    by_name = word in ("properties", "dependentSchemas")
    many: Any = {f"p{i}": ref for i in range(n)} if by_name else [ref] * n
    return {word: many, "$defs": dict(rng.sample(sorted(named.items()), len(named)))}


def _patterns(rng: random.Random) -> Body:
    n = rng.randint(4, 40)
    letters = "abcdefgh"
    all_of = [{"pattern": f"[a-z]*{rng.choice(letters)}{{{i % 9 + 1}}}[a-z]*"} for i in range(n)]
    return {"type": "string", "allOf": all_of}


def _schema_request(rng: random.Random) -> Request:
    schema = rng.choice((_schema, _patterns))(rng)
    if rng.random() < 0.5:
        return ask_for(CHAT, {**HI, "json_schema": schema})
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    choice = rng.choice(("auto", "required"))
    tools = [{"type": "function", "function": function}]
    return ask_for(CHAT, {**HI, "tools": tools, "tool_choice": choice})


def _conversation(rng: random.Random) -> Body:
    n = rng.choice((300, 1500, 4000))
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result: Body = {"role": "tool", "tool_call_id": "x", "content": "r"}
    turn: Body = {"role": "assistant", "content": "", "tool_calls": [call]}
    question: Body = {"role": "user", "content": "a"}
    system: Body = {"role": "system", "content": "a"}
    kinds: tuple[list[Body], ...] = (
        [{**turn, "tool_calls": [call] * n}, *[result] * n],
        [turn, result] * n,
        *([one] * n for one in (turn, result, question, system)),
    )
    many = rng.choice(kinds)
    return {"messages": [question, *many], "max_tokens": 1}


def _rendering_request(rng: random.Random) -> Request:
    path = rng.choice((CHAT, "/apply-template", "/v1/chat/completions/input_tokens"))
    return ask_for(path, _conversation(rng))


def _beside_the_queue(rng: random.Random) -> Request:
    text = "x " * rng.choice((10_000, 500_000, 20_000_000))
    messages = [{"role": "user", "content": text}]
    path, body = rng.choice(
        (
            ("/tokenize", {"content": text}),
            ("/v1/chat/completions/input_tokens", {"messages": messages}),
            ("/v1/messages/count_tokens", {"messages": messages}),
            ("/apply-template", {"messages": messages}),
            ("/detokenize", {"tokens": [1] * (len(text) // 8)}),
        )
    )
    return ask_for(path, body)


def _compressed(rng: random.Random) -> Request:
    text = json.dumps({"content": "x" * rng.choice((10, 10_000_000, 100_000_000))}).encode()
    data = gzip.compress(text, 1)
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data))]
    names = rng.choice(("gzip", "deflate", "gzip, gzip", "br", "zstd"))
    if names == "gzip, gzip":
        data = gzip.compress(data, 1)
    return Request("/tokenize", data, headers={"Content-Encoding": names})


KINDS: tuple[Callable[[random.Random], Request], ...] = (
    _schema_request, _rendering_request, _beside_the_queue, _compressed,
    long_lists, stored, stream, salted,
)  # fmt: skip


def hostile(seed: int, number: int) -> Request:
    """Return try `number` of a seed, which is always the same."""
    rng = random.Random(f"steps {seed} {number}")
    return KINDS[number % len(KINDS)](rng)


def steps_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Send the tries, several at once, beside a normal client."""
    outcome = Outcome("steps", len(numbers))
    again = f"{ATTACK} --part steps --seed {seed} --only {numbers.start}-{numbers.stop}"
    log = folder / "steps.log"
    with serving(log, SERVE) as program:
        asyncio.run(_attack(program, seed, numbers, outcome))
        code = program.end()
    if code != 0:
        outcome.breaches.append(Breach(f"the server ended with {code}", again))
    outcome.breaches += [Breach(f"{log.name}: {line}", again) for line in bad_lines(program.said())]
    return outcome


async def _attack(program: Program, seed: int, numbers: range, outcome: Outcome) -> None:
    left = iter(numbers)
    over = asyncio.Event()
    await send(program.port, ask_for(CHAT, HI))
    measuring = asyncio.ensure_future(_measure(program, over, outcome))
    with bystander(program.port, outcome, "steps"):
        workers = (_send_all(program.port, seed, left, outcome) for _ in range(_N_AT_ONCE))
        await asyncio.gather(*workers)
    over.set()
    await measuring


async def _send_all(port: int, seed: int, left: Iterator[int], outcome: Outcome) -> None:
    for number in left:
        command = f"{ATTACK} --part steps --seed {seed} --only {number}"
        try:
            request = await asyncio.to_thread(hostile, seed, number)
            answer = await send(port, request, _PATIENCE_S)
        except NoAnswer as e:
            outcome.tally["no answer"] += 1
            outcome.breaches.append(Breach(str(e), command))
            continue
        outcome.tally[str(answer.status)] += 1
        if answer.status >= 500 and answer.status != 503:
            outcome.breaches.append(Breach(f"{answer.status}: {answer.body[-300:]!r}", command))


async def _measure(program: Program, over: asyncio.Event, outcome: Outcome) -> None:
    """Note the most memory that the server takes."""
    most_bytes = 0
    while not over.is_set():
        most_bytes = max(most_bytes, program.rss_bytes())
        await asyncio.sleep(_PAUSE_S)
    outcome.figures["most MB"] = most_bytes >> 20
    if most_bytes > _MOST_BYTES:
        outcome.breaches.append(Breach(f"{most_bytes >> 20} MB", f"{ATTACK} --part steps"))
