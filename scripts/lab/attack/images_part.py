"""Images that take long, grow or are damaged, from clients that may leave, beside a witness."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import PIL.Image

from lab.attack import ATTACK
from lab.attack.client import N_TOKENS, NoAnswer, Witness, ask_for, send, text_of
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import Program, bad_lines, serving
from lab.synth.projector import write_projector
from lab.synth.shape import Shape
from lab.synth.write import plan_shape, write

_LONGEST_WAIT_S = 2.0  # of the witness
_PATIENCE_S = 150.0  # a decoder may take 120 s if it gets little of the processor
_N_AT_ONCE = 6
_METADATA: dict[str, Any] = {
    "block_count": 3,
    "embedding_length": 64,
    "feed_forward_length": 64,
    "context_length": 2048,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "rope.dimension_sections": (6, 5, 5, 0),
}

# The model has random weights. After these texts, its tokens lead by 0.4 nat or more.
_PROMPTS = ("x = 1\nx = 1\nx = 1\nx = 1\nx =", "# -*- coding: utf-8 ")

Maker = Callable[[random.Random], list[bytes]]  # the images of a request


def _saved(size: tuple[int, int], kind: str, **given: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", size, (9, 99, 199)).save(file, kind, **given)
    return file.getvalue()


def _slow(rng: random.Random) -> list[bytes]:
    """A progressive JPEG file of empty scans."""
    width_px = rng.randrange(500, 4000)
    start = _saved((width_px, width_px), "JPEG", progressive=True).removesuffix(b"\xff\xd9")
    scan = bytes([0xFF, 0xDA, 0, 8, 1, 1, 0, 0, 0, 0x10])
    return [start + rng.randrange(10_000, 100_000) * scan + b"\xff\xd9"]


def _large(rng: random.Random) -> list[bytes]:
    """Small files of many pixels."""
    side_px = rng.randrange(1000, 8000)
    return [_saved((side_px, side_px), "PNG")] * rng.randrange(1, 8)


def _many(rng: random.Random) -> list[bytes]:
    return [_saved((rng.randrange(1, 900), rng.randrange(1, 900)), "JPEG")] * rng.randrange(2, 70)


def _damaged(rng: random.Random) -> list[bytes]:
    size = (rng.randrange(1, 300), rng.randrange(1, 300))
    file = bytearray(_saved(size, rng.choice(["PNG", "JPEG", "GIF", "BMP"])))
    for _ in range(rng.randrange(1, 20)):
        file[rng.randrange(len(file))] = rng.randrange(256)
    return [bytes(file[: rng.randrange(1, len(file) + 1)])]


def _bomb(rng: random.Random) -> list[bytes]:
    """A header of any size before the data of another one."""
    file = bytearray(_saved((64, 64), "PNG"))
    file[16:24] = rng.randbytes(8) if rng.random() < 0.5 else bytes([0, 0, 27, 0] * 2)
    return [bytes(file)]


MAKERS: tuple[Maker, ...] = (_slow, _large, _many, _damaged, _bomb)


@contextmanager
def serving_images(folder: Path) -> Iterator[Program]:
    """Serve a small model that reads images, with random weights."""
    model, projector = folder / "model.gguf", folder / "mmproj.gguf"
    write(plan_shape(Shape("qwen2vl", "qwen2vl", _METADATA, n_vocab=600)), model, 3)
    write_projector(projector, "qwen2.5vl_merger", 64)
    flags = (
        *("-m", str(model), "--mmproj", str(projector), "--image-max-tokens", "64"),
        *("--ctx-size", "1024", "--threads", "1", "--temp", "0", "--parallel", "4"),
    )
    with serving(folder / "images.log", flags) as server:
        yield server


def images_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Send one request with images for each number."""
    outcome = Outcome("images", len(numbers))
    with serving_images(folder) as server:
        wrong = asyncio.run(_attack(server, seed, numbers, outcome))
        server.end()
        wrong += bad_lines(server.said())
    command = f"{ATTACK} --part images --seed {seed} --only {numbers.start}-{numbers.stop}"
    outcome.breaches += [Breach(what, command) for what in wrong]
    return outcome


async def _attack(server: Program, seed: int, numbers: range, outcome: Outcome) -> list[str]:
    texts = {prompt: await text_of(server.port, prompt, N_TOKENS) for prompt in _PROMPTS}
    over = asyncio.Event()
    witness = Witness(server.port, texts)
    watching = asyncio.create_task(witness.watch(over))
    places = asyncio.Semaphore(_N_AT_ONCE)
    wrong: list[str] = []

    async def one(number: int) -> None:
        async with places:
            ended, breach = await _try(server.port, random.Random(f"images {seed} {number}"))
        outcome.tally[ended] += 1
        wrong.extend([f"{number}: {breach}"] * bool(breach))

    await asyncio.gather(*map(one, numbers))
    over.set()
    await watching
    outcome.figures["longest wait of the witness, s"] = round(witness.longest_s, 2)
    if witness.longest_s > _LONGEST_WAIT_S:
        wrong.append(f"the witness waited {witness.longest_s:.1f} s")
    return [*wrong, *witness.lost]


async def _try(port: int, rng: random.Random) -> tuple[str, str]:
    """Return how the request ended, and what is wrong with that, "" if nothing is."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": base64.b64encode(file).decode()}}
        for file in rng.choice(MAKERS)(rng)
    ]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}
    body = {"messages": [user], "max_tokens": 2}
    leaves = rng.random() < 0.3
    try:
        asked = send(port, ask_for("/v1/chat/completions", body), _PATIENCE_S)
        answer = await asyncio.wait_for(asked, rng.random() * 3 if leaves else None)
    except TimeoutError:
        return "the client left", ""
    except NoAnswer as e:
        return "no answer", str(e)
    is_allowed = answer.status in (200, 400, 413, 503)
    return str(answer.status), "" if is_allowed else f"{answer.status}: {answer.body[:200]!r}"
