"""Asks a server of several models for reloads, names and lists, and looks for its secrets.

Half of the requests have the key. The folder of the models has a FIFO and files that are no models.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

from lab.attack import ATTACK
from lab.attack.bystander import CHAT, HI, bystander
from lab.attack.client import NoAnswer, Request, ask_for, send
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import bad_lines, serving
from lab.synth import write_preset

_KEY, _SECRET = "attackers-may-not-see-this", "hf_secretsecretsecretsecret"
_N_AT_ONCE = 4
_PATIENCE_S = 60.0
_NAMES = (
    "first",
    "second",
    "pipe",
    "empty",
    "../first",
    "first\0",
    "",
    "x" * 5000,
    _SECRET,
    None,
    7,
)
_PATHS = (
    *("/v1/models", "/models", "/models?reload=1", "/models?reload=%00", "/api/tags", "/health"),
    *("/props", "/props?model=first", "/metrics", "/slots", "/v1/models/first", "/router/status"),
)


def models_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Send the tries. No answer without the key may have a secret or a path of the machine."""
    outcome = Outcome("models", len(numbers))
    command = f"{ATTACK} --part models --seed {seed} --only {numbers.start}-{numbers.stop}"
    flags = _prepared(folder)
    with serving(folder / "models.log", flags) as server:
        # The bystander asks without a key, as a page of another site would: only for health.
        with bystander(server.port, outcome, "models", chats=False):
            asyncio.run(_attack(server.port, seed, numbers, folder, outcome))
        code = server.end()
        wrong = bad_lines(server.said())
    wrong += [f"the server ended with {code}"] * (code != 0)
    outcome.breaches += [Breach(what, command) for what in wrong]
    return outcome


def _prepared(folder: Path) -> tuple[str, ...]:
    """Write the models and the presets, and return the server's flags."""
    models = folder / "models"
    models.mkdir()
    for name in ("first", "second"):
        write_preset("qwen3-30b-a3b", models / f"{name}.gguf", size="tiny", seed=1)
    os.mkfifo(models / "pipe.gguf")
    (models / "empty.gguf").touch()
    presets = folder / "models.ini"
    presets.write_text(f"[first]\nhf-token = {_SECRET}\nctx-size = 256\n")
    return (
        *("--models-dir", str(models), "--models-preset", str(presets), "--api-key", _KEY),
        *("--models-max", "1", "--device", "cpu", "-t", "1", "-c", "256", "-n", "4"),
    )


def hostile(seed: int, number: int, folder: Path) -> tuple[Request, bool]:
    """Return try `number` of a seed, and if it has the key. It may change a file of the folder."""
    rng = random.Random(f"models {seed} {number}")
    has_key = rng.random() < 0.5
    headers = {"Authorization": f"Bearer {_KEY if has_key else 'x' * rng.choice((1, 9000))}"}
    model = rng.choice(_NAMES)
    kind = rng.randrange(4)
    if kind == 0:
        presets = folder / "models.ini"
        presets.write_text(f"[first]\nhf-token = {_SECRET}\nctx-size = {rng.choice((256, 300))}\n")
        return Request("/models?reload=1", method="GET", headers=headers), has_key
    if kind == 1:
        return Request(rng.choice(_PATHS), method="GET", headers=headers), has_key
    if kind == 2:
        path = rng.choice(("/models/load", "/models/unload"))
        return ask_for(path, {"model": model}, **headers), has_key
    return ask_for(CHAT, {**HI, "model": model}, **headers), has_key


async def _attack(port: int, seed: int, numbers: range, folder: Path, outcome: Outcome) -> None:
    async def worker(left: Iterator[int]) -> None:
        for number in left:
            await _try(port, seed, number, folder, outcome)

    left = iter(numbers)
    await asyncio.gather(*(worker(left) for _ in range(_N_AT_ONCE)))


async def _try(port: int, seed: int, number: int, folder: Path, outcome: Outcome) -> None:
    command = f"{ATTACK} --part models --seed {seed} --only {number}"
    request, has_key = hostile(seed, number, folder)
    try:
        answer = await send(port, request, _PATIENCE_S)
    except NoAnswer as e:
        outcome.tally["no answer"] += 1
        outcome.breaches.append(Breach(str(e), command))
        return
    outcome.tally[str(answer.status)] += 1
    said = answer.body + repr(sorted(answer.headers.items())).encode()
    secrets = [_SECRET, _KEY] + [str(folder)] * (not has_key)
    shown = [secret for secret in secrets if secret.encode() in said]
    if shown and _SECRET.encode() not in request.body:
        outcome.breaches.append(Breach(f"{request.path} shows {shown[0]}", command))
    if answer.status >= 500 and answer.status != 503 and b"failed to load" not in answer.body:
        outcome.breaches.append(Breach(f"{answer.status}: {answer.body[-300:]!r}", command))
