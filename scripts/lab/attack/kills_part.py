"""Kills processes under load, and sends signals at random moments of a server's life."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

from lab.attack import ATTACK
from lab.attack.client import NoAnswer, Witness, ask_for, decided_texts, send
from lab.attack.http_part import SERVE, figures_of
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import Program, bad_lines, serving

_N_CLIENTS = 8
_BACK_S = 30.0


def kills_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Number 0 kills the engine several times and number 1 the API process. The others send
    signals."""
    outcome = Outcome("kills", len(numbers))
    for number in numbers:
        rng = Random(f"{seed}/{number}")
        command = f"{ATTACK} --part kills --seed {seed} --only {number}"
        if number == 0:
            found = asyncio.run(_kill_engines(rng, folder, outcome))
        elif number == 1:
            found = _kill_the_server(rng, folder, outcome)
        else:
            found = _signal(rng, folder, outcome)
        outcome.breaches += [Breach(what, command) for what in found]
    return outcome


async def _kill_engines(rng: Random, folder: Path, outcome: Outcome, n_kills: int = 3) -> list[str]:
    """Kill the engine `n_kills` times under load. Every client must get an answer or an error. The
    witness must get its usual texts afterwards."""
    with serving(folder / "kills.log", SERVE) as server:
        witness = Witness(server.port, await decided_texts(server.port), bears_deaths=True)
        over = asyncio.Event()
        watching = asyncio.ensure_future(witness.watch(over))
        clients = [asyncio.ensure_future(_load(server.port, over)) for _ in range(_N_CLIENTS)]
        for _ in range(n_kills):
            await asyncio.sleep(rng.uniform(0.1, 1.5))
            engine = server.engine()
            if engine is not None:
                with suppress(psutil.NoSuchProcess):
                    engine.kill()
                outcome.tally["engine killed"] += 1
            await asyncio.to_thread(server.wait_until_healthy, _BACK_S)
        over.set()
        found = [what for client in clients for what in await client]
        await watching
        await witness_again(witness)
        outcome.figures |= figures_of(witness)
        code = await asyncio.to_thread(server.end)
        found += witness.lost + bad_lines(server.said())
    return found + ([f"the server ended with {code}"] if code else [])


async def witness_again(witness: Witness) -> None:
    """Let the witness ask for one more second, in which no error is allowed."""
    witness.bears_deaths = False
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, over.set)
    await witness.watch(over)


async def _load(port: int, over: asyncio.Event) -> list[str]:
    """Send requests until `over` is set. Returns each response that is neither an answer nor an
    error of a killed engine."""
    found = []
    while not over.is_set():
        body = {"prompt": "import os\n", "max_tokens": 40, "ignore_eos": True}
        try:
            answer = await send(port, ask_for("/v1/completions", body))
        except NoAnswer as e:
            found.append(f"a client got {e}")
            continue
        if answer.status not in (200, 500, 503):
            found.append(f"a client got {answer.status}: {answer.body[:200]!r}")
        if answer.status == 503:
            await asyncio.sleep(0.1)
    return found


def _kill_the_server(rng: Random, folder: Path, outcome: Outcome) -> list[str]:
    """Kill the API process under load. None of its children may survive."""
    with serving(folder / "killed.log", SERVE) as server:
        children = server.parts()[1:]
        over = asyncio.Event()

        async def under_load() -> None:
            loads = [asyncio.ensure_future(_load(server.port, over)) for _ in range(4)]
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            os.kill(server.process.pid, signal.SIGKILL)
            over.set()
            await asyncio.gather(*loads)

        asyncio.run(under_load())
        outcome.tally["server killed"] += 1
        _, alive = psutil.wait_procs(children, timeout=10)
        return [f"{p.name()} {p.pid} outlives the server" for p in alive]


def _signal(rng: Random, folder: Path, outcome: Outcome) -> list[str]:
    """Send SIGTERM or SIGINT at a random moment, to the process or to its group."""
    sent = rng.choice((signal.SIGTERM, signal.SIGINT))
    to_group, after_s = rng.random() < 0.5, rng.uniform(0.0, 5.0)
    server = Program(folder / "signals.log", SERVE)
    try:
        time.sleep(after_s)
        children = server.parts()[1:]
        began = bool(server.said())
        (os.killpg if to_group else os.kill)(server.process.pid, sent)
        try:
            code = server.process.wait(30)
        except Exception:
            return [f"{sent.name} after {after_s:.2f} s does not end it"]
        outcome.tally[f"{sent.name} {code}"] += 1
        _, alive = psutil.wait_procs(children, timeout=10)
        found = [f"{p.pid} outlives {sent.name} after {after_s:.2f} s" for p in alive]
        # Before the program's first line, the signal may kill Python itself.
        allowed = {0, 130} if began else {0, 130, -sent}
        if code not in allowed:
            found.append(f"exit code {code} of {sent.name} after {after_s:.2f} s")
        return found + [f"{sent.name} after {after_s:.2f} s: {x}" for x in bad_lines(server.said())]
    finally:
        server.kill()
