"""Sends large bodies beside the queue, all at once, while the engine is busy."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.attack import ATTACK
from lab.attack.bystander import bystander
from lab.attack.client import NoAnswer, Request, read
from lab.attack.images_part import serving_images
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import LOOPBACK, Program, bad_lines

_N_AT_ONCE = 24
_MOST_GROWTH_BYTES = 768 << 20
_PATIENCE_S = 120.0
_SIZES_MIB = (1, 10, 40)
_ALLOWED = (200, 400, 413, 503, 529)
_PATHS = (
    "/v1/chat/completions/input_tokens",
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/apply-template",
)


def bodies_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Send 24 bodies at a time. Memory may grow by 768 MiB, and a normal client may not wait."""
    outcome = Outcome("bodies", len(numbers))
    command = f"{ATTACK} --part bodies --seed {seed} --only {numbers.start}-{numbers.stop}"
    with serving_images(folder) as server:
        over = threading.Event()
        most_bytes = [before_bytes := server.rss_bytes()]
        watching = threading.Thread(target=_measure, args=(server, over, most_bytes))
        watching.start()
        with bystander(server.port, outcome, "bodies"), ThreadPoolExecutor(_N_AT_ONCE) as threads:
            tries = [threads.submit(_try, server.port, seed, number) for number in numbers]
            ended = [one.result() for one in tries]
        over.set()
        watching.join()
        server.end()
        wrong = bad_lines(server.said())
    outcome.tally.update(what for what, _ in ended)
    wrong += [breach for _, breach in ended if breach]
    outcome.figures |= {"MB before": before_bytes >> 20, "most MB": max(most_bytes) >> 20}
    if max(most_bytes) - before_bytes > _MOST_GROWTH_BYTES:
        wrong.append(f"{max(most_bytes) >> 20} MB")
    outcome.breaches += [Breach(what, command) for what in wrong]
    return outcome


def _measure(server: Program, over: threading.Event, most_bytes: list[int]) -> None:
    while not over.wait(0.1):
        most_bytes.append(server.rss_bytes())


def _body(path: str, n_bytes: int) -> bytes:
    text = "x " * (n_bytes // 2)
    if path == "/tokenize":
        return json.dumps({"content": text}).encode()
    if path == "/v1/responses/input_tokens":
        return json.dumps({"input": text}).encode()
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


def _try(port: int, seed: int, number: int) -> tuple[str, str]:
    """Return how one request ended, and its breach, "" for none."""
    rng = random.Random(f"bodies {seed} {number}")
    path = rng.choice(_PATHS)
    data = Request(path, _body(path, rng.choice(_SIZES_MIB) << 20)).raw(port)
    leaves = rng.random() < 0.2
    found = b""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=_PATIENCE_S) as connection:
            # After an early refusal, the answer can perhaps still be read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
            if leaves:
                time.sleep(rng.random())
                return "left", ""
            while part := connection.recv(1 << 16):
                found += part
    except TimeoutError:
        return "no answer", f"{number}: no answer in {_PATIENCE_S:g} s"
    except OSError as e:
        if not found:
            return "closed", "" if isinstance(e, ConnectionResetError) else f"{number}: {e}"
    try:
        status = read(found).status
    except NoAnswer as e:
        return "no answer", f"{number}: {e}"
    return str(status), "" if status in _ALLOWED else f"{number}: {found[:300]!r}"
