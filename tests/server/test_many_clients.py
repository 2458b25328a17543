"""Many clients at once: every stream is whole, and every one of them hears of a death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
from fake_generator import TAIL, FakeFactory
from running import StartServer, eventually, http

N_CLIENTS = 64
N_KILLED = 16


async def stream(client: httpx.AsyncClient, url: str, prompt: str) -> list[dict[str, Any]]:
    """The events of a streamed completion, [DONE] left out; the last may be an error."""
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", url + "/v1/completions", json=body) as response:
        raw = await response.aread()
    if response.status_code != 200:  # it had no piece yet
        return [json.loads(raw)]
    events = raw.split(b"\n\n")  # not by lines of text, which U+2028 ends as well
    data = [e.removeprefix(b"data: ") for e in events if e.startswith(b"data: {")]
    return [json.loads(event) for event in data]


async def streams(url: str, prompts: list[str]) -> list[list[dict[str, Any]]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(verify=False, timeout=60, limits=limits) as client:
        return await asyncio.gather(*(stream(client, url, prompt) for prompt in prompts))


def test_no_token_of_64_streams_is_lost_or_comes_twice(start_server: StartServer) -> None:
    """More clients than slots, twice: those that wait are served in their turn."""
    server = start_server(FakeFactory(n_parallel=8), max_queue=N_CLIENTS)
    prompts = [f"client {n}: " + chr(0x4E00 + n) * (n % 7) for n in range(N_CLIENTS)]
    for _ in range(2):
        for prompt, events in zip(prompts, asyncio.run(streams(server.url, prompts)), strict=True):
            choices = [event["choices"][0] for event in events if event["choices"]]
            assert "".join(choice["text"] for choice in choices) == prompt + TAIL
            assert [choice["finish_reason"] for choice in choices][-1] == "stop"
            assert len({event["id"] for event in events}) == 1
            assert events[-1]["usage"]["completion_tokens"] == len(prompt + TAIL)
    props = server.props()
    assert (props["requests_processing"], props["requests_deferred"]) == (0, 0)


def test_every_client_of_a_killed_engine_is_told_and_the_next_is_served(
    start_server: StartServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    server = start_server(FakeFactory(log=log, n_parallel=N_KILLED))

    async def killed() -> list[list[dict[str, Any]]]:
        prompts = [f"[forever] {n}" for n in range(N_KILLED)]
        running = asyncio.ensure_future(streams(server.url, prompts))
        while (await asyncio.to_thread(server.props))["requests_processing"] < N_KILLED:
            await asyncio.sleep(0.02)
        os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
        return await running

    for n, events in enumerate(asyncio.run(killed())):
        error = events[-1]["error"]
        assert error["code"] == 500
        assert "was killed by SIGKILL while it served this request" in error["message"]
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        whole = f"[forever] {n}" + TAIL + "." * len(text)
        assert whole.startswith(text)
    eventually(lambda: http.get(server.url + "/health").status_code == 200)
    answer = http.post(server.url + "/v1/completions", json={"prompt": "after"}).json()
    assert answer["choices"][0]["text"] == "after" + TAIL
    assert server.props()["engine_restarts"] == 1
