"""A stream begins when its prompt is accepted, before the prompt is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest
from fake_generator import FakeFactory
from running import Running, StartServer, eventually, http

from specoffload.generation.generation import GenerateOptions
from specoffload.server.api import streaming
from specoffload.server.api.streaming import TicketGroup
from specoffload.server.engine.client import EngineClient, SubmittedJob
from specoffload.server.engine.messages import CompletionJob, GeneratingJob, JobEvent, Started

HANG = "[hang-now]"  # the engine accepts the prompt, and makes no piece
CHAT = {"messages": [{"role": "user", "content": HANG}]}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": HANG},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/completions": {"prompt": HANG},
    "/completion": {"prompt": HANG},
}
OPENINGS = {
    "/v1/chat/completions": ["chat.completion.chunk"],
    "/v1/responses": ["response.created", "response.in_progress"],
    "/v1/messages": ["message_start"],
}


def _first_events(answer: httpx.Response, n: int) -> list[dict[str, Any]]:
    """The data of the first `n` events of a stream."""
    found: list[dict[str, Any]] = []
    lines = answer.iter_lines()
    while len(found) < n:
        line = next(lines)
        if line.startswith("data: "):
            found.append(json.loads(line.removeprefix("data: ")))
    return found


@pytest.fixture
def patient(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server that sends no keep-alive comment during a test."""
    monkeypatch.setattr(streaming, "_HEADER_PATIENCE_S", 1000.0)
    monkeypatch.setattr(streaming, "_KEEP_ALIVE_S", 1000.0)
    return start_server()


@pytest.mark.parametrize("path", PATHS)
def test_the_header_and_the_role_do_not_wait_for_the_first_token(
    patient: Running, path: str
) -> None:
    body = {**PATHS[path], "stream": True}
    with http.stream("POST", patient.url + path, json=body) as answer:
        assert answer.status_code == 200
        kinds = OPENINGS.get(path, [])
        events = _first_events(answer, len(kinds))
        assert [event.get("type") or event["object"] for event in events] == kinds
        if path == "/v1/chat/completions":
            delta = {"role": "assistant", "content": ""}
            assert [choice["delta"] for choice in events[0]["choices"]] == [delta]
        if path == "/v1/messages":
            assert events[0]["message"]["usage"]["input_tokens"] > 0


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_is_refused_keeps_its_status(patient: Running, path: str) -> None:
    body = json.loads(json.dumps(PATHS[path]).replace(HANG, "[refuse]"))
    answer = http.post(patient.url + path, json={**body, "stream": True})
    assert answer.status_code == 400
    assert "the fake refuses this prompt" in answer.text


def test_each_answer_to_a_chat_gets_its_role_once(start_server: StartServer) -> None:
    server = start_server(FakeFactory(n_parallel=2))
    messages = [{"role": "user", "content": "[say]hi[/say]"}]
    body = {"messages": messages, "n": 2, "stream": True}
    text = http.post(server.url + "/v1/chat/completions", json=body).text
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert [c["index"] for c in choices if "role" in c["delta"]] == [0, 1]


def test_a_failure_while_the_prompt_is_read_is_an_event_of_the_stream(
    start_server: StartServer,
) -> None:
    server = start_server()
    for path, fields in PATHS.items():
        body = json.loads(json.dumps(fields).replace(HANG, "[raise-now]"))
        answer = http.post(server.url + path, json={**body, "stream": True})
        assert answer.status_code == 200, path
        assert "the fake was told to fail" in answer.text
        assert "[DONE]" not in answer.text


class _Engine:
    """Takes jobs, and lets the test tell what becomes of them."""

    n_parallel = 2

    def __init__(self) -> None:
        self.hears: list[Callable[[JobEvent, float], None]] = []

    def submit(
        self, job: GeneratingJob, hear: Callable[[JobEvent, float], None], client: str
    ) -> SubmittedJob:
        self.hears.append(hear)
        return SubmittedJob(len(self.hears), job, client, hear, lambda ticket: None)


def test_a_list_of_prompts_begins_when_all_that_were_submitted_are_accepted() -> None:
    async def check() -> None:
        engine = _Engine()
        jobs = [CompletionJob("x", GenerateOptions())] * 3
        group = TicketGroup(cast(EngineClient, engine), jobs, "")
        assert len(engine.hears) == 2
        assert not group.has_started
        engine.hears[0](Started(1), 0.0)
        assert not group.has_started
        engine.hears[1](Started(1), 0.0)
        assert group.has_started

    asyncio.run(check())


def test_a_queued_request_gets_its_header_when_its_turn_comes(patient: Running) -> None:
    """The status of a request that waits is not known yet."""
    body = {"prompt": "[slow][forever]", "stream": True}
    with http.stream("POST", patient.url + "/v1/completions", json=body) as running:
        assert running.status_code == 200
        eventually(lambda: patient.props()["requests_processing"] == 1)
        with pytest.raises(httpx.ReadTimeout):
            http.post(patient.url + "/v1/completions", json={**body, "prompt": "x"}, timeout=0.3)


def test_a_long_step_delays_no_header(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's step does not end in this test, and other requests are accepted or refused."""
    monkeypatch.setattr(streaming, "_HEADER_PATIENCE_S", 1000.0)
    server = start_server(FakeFactory(n_parallel=3))
    url = server.url + "/v1/chat/completions"
    with http.stream("POST", url, json={**CHAT, "stream": True}) as hanging:
        assert hanging.status_code == 200
        messages = [{"role": "user", "content": "[say]hi[/say]"}]
        with http.stream("POST", url, json={"messages": messages, "stream": True}) as answer:
            assert answer.status_code == 200
            assert _first_events(answer, 1)[0]["choices"][0]["delta"]["role"] == "assistant"
            refused = http.post(server.url + "/completion", json={"prompt": "[refuse]"})
            assert (refused.status_code, refused.json()["error"]["type"]) == (
                400,
                "invalid_request_error",
            )
            too_long = http.post(server.url + "/completion", json={"prompt": "x" * 600})
            assert too_long.status_code == 400
            assert too_long.json()["error"]["n_prompt_tokens"] == 601
