"""The server on the stand-in: four slots at once, a client that leaves, a killed engine."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from program import Program, serving
from running import eventually, http

N_SLOTS = 4
PROMPTS = [f"def f{i}(x):\n    return" for i in range(N_SLOTS)]
N_PREDICTED = 12
STREAMED = ("--n-cpu-moe", "99", "--min-batch", "1", "--vram", "92MiB", "--ubatch-size", "64")


def text_of(program: Program, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": N_PREDICTED}
    answer: dict[str, Any] = http.post(program.url + "/v1/completions", json=body).json()
    text: str = answer["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The texts that the CPU generates, one prompt at a time."""
    with serving("--device", "cpu", "--no-spec") as program:
        return [text_of(program, prompt) for prompt in PROMPTS]


@pytest.fixture(
    scope="module",
    params=[("--hybrid", "off"), ("--hybrid", "on")],
    ids=["streamed", "split"],
)
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    flags = (
        "--device",
        "CUDA0",
        "--parallel",
        str(N_SLOTS),
        "--no-spec",
        *STREAMED,
        *request.param,
    )
    with serving(*flags, "--ctx-size", "2048") as program:
        yield program


def endless(program: Program, prompt: str, begun: threading.Event) -> Iterator[dict[str, Any]]:
    """The events of a stream that goes on to the end of the context."""
    body = {"prompt": prompt, "stream": True, "ignore_eos": True}
    with http.stream("POST", program.url + "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                begun.set()
                yield json.loads(line[6:])


def test_four_requests_at_once_are_answered_as_one_at_a_time(
    program: Program, expected: list[str]
) -> None:
    with ThreadPoolExecutor(N_SLOTS) as pool:
        texts = list(pool.map(lambda prompt: text_of(program, prompt), PROMPTS))
    assert texts == expected


def test_a_client_that_leaves_changes_no_other_answer(
    program: Program, expected: list[str]
) -> None:
    stream = endless(program, "def g(y):\n", threading.Event())
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(text_of, program, PROMPTS[0])
        next(stream)
        stream.close()
        assert other.result() == expected[0]
    eventually(lambda: http.get(program.url + "/props").json()["requests_processing"] == 0)


def test_a_killed_engine_is_told_and_the_next_request_is_served(
    program: Program, expected: list[str]
) -> None:
    begun = [threading.Event() for _ in PROMPTS]
    with ThreadPoolExecutor(N_SLOTS) as pool:
        streams = [
            pool.submit(lambda *of: list(endless(program, *of)), prompt, event)
            for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        assert all(event.wait(60) for event in begun)
        [engine] = [
            child
            for child in psutil.Process(program.process.pid).children()
            if any("libllama" in place.path for place in child.memory_maps())
        ]
        os.kill(engine.pid, signal.SIGKILL)
        for stream in streams:
            assert "was killed by SIGKILL" in stream.result()[-1]["error"]["message"]
    eventually(lambda: http.get(program.url + "/health").status_code == 200, 60)
    assert text_of(program, PROMPTS[0]) == expected[0]
