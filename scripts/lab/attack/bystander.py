"""A normal client in a process of its own, so that an attacker's own work does not delay it."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from lab.attack import ATTACK
from lab.attack.client import NoAnswer, Request, ask_for, send
from lab.attack.outcome import Breach, Outcome

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
_MOST_WAIT_S = 2.0
_PAUSE_S = 0.1
_END_S = 60.0


@dataclass
class Waits:
    """What a bystander saw. `own_s` is its longest delay without a server: the machine's load."""

    longest_s: dict[str, float] = field(default_factory=dict)  # by path
    n_answers: int = 0
    own_s: float = 0.0
    lost: list[str] = field(default_factory=list)


@contextmanager
def bystander(port: int, outcome: Outcome, part: str, *, chats: bool = True) -> Iterator[None]:
    """Ask for the health and, with `chats`, a short chat by turns.

    At the end the waits are put into `outcome`.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, port, chats), daemon=True)
    process.start()
    theirs.close()
    ours.recv()  # it has begun
    try:
        yield
    finally:
        ours.send(None)
        waits = ours.recv() if ours.poll(_END_S) else Waits(lost=["the bystander did not end"])
        process.kill()
        _note(waits, outcome, f"{ATTACK} --part {part}")


def _note(waits: Waits, outcome: Outcome, command: str) -> None:
    outcome.figures["bystander's answers"] = waits.n_answers
    outcome.figures["its delay without a server, s"] = round(waits.own_s, 2)
    outcome.breaches += [Breach(what, command) for what in waits.lost]
    for path, took_s in waits.longest_s.items():
        outcome.figures[f"{path}: longest s"] = round(took_s, 2)
        if took_s > _MOST_WAIT_S:
            outcome.breaches.append(Breach(f"{path} took {took_s:.1f} s", command))


def _main(connection: Connection, port: int, chats: bool) -> None:
    connection.send(None)
    connection.send(asyncio.run(_watch(connection, port, chats)))


async def _watch(connection: Connection, port: int, chats: bool) -> Waits:
    waits = Waits()
    requests = [Request("/health", method="GET"), *[ask_for(CHAT, HI)] * chats]
    while not connection.poll():
        for request in requests:
            began_s = time.monotonic()
            try:
                answer = await send(port, request)
            except NoAnswer as e:
                waits.lost.append(f"{request.path}: {e}")
            else:
                waits.n_answers += 1
                if answer.status not in (200, 503):
                    waits.lost.append(f"{request.path}: {answer.status} {answer.body[:200]!r}")
            took_s = time.monotonic() - began_s
            waits.longest_s[request.path] = max(waits.longest_s.get(request.path, 0.0), took_s)
        began_s = time.monotonic()
        await asyncio.sleep(_PAUSE_S)
        waits.own_s = max(waits.own_s, time.monotonic() - began_s - _PAUSE_S)
    return waits
