"""Each API says in its own words what clients act upon. The rules are those of the clients."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_generator import FakeFactory
from hypothesis import given
from hypothesis import strategies as st
from running import Running, RunningModels, StartServer, eventually, http

from specoffload.server.access import AccessRules
from specoffload.server.api.refusals import Api, api_of, error_body, refusal_of
from specoffload.server.engine.messages import Event, Problem

Check = Callable[[int, dict[str, Any]], bool]
N_CTX = 512


def _asked(text: str, **fields: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """The body of each path that asks for an answer to `text`, and the name of its limit."""
    chat = {"messages": [{"role": "user", "content": text}]}
    found = {
        "/v1/chat/completions": (chat, "max_tokens"),
        "/v1/completions": ({"prompt": text}, "max_tokens"),
        "/v1/responses": ({"input": text}, "max_output_tokens"),
        "/v1/messages": ({**chat, "max_tokens": 9}, "max_tokens"),
        "/completion": ({"prompt": text}, "n_predict"),
    }
    return {path: ({**body, **fields}, limit) for path, (body, limit) in found.items()}


PATHS = [*_asked("")]


def _post(server: Running, path: str, text: str, **fields: Any) -> httpx.Response:
    return http.post(server.url + path, json=_asked(text, **fields)[path][0])


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# ---- the rules of clients, as their sources have them


def _opencode_is_overflow(status: int, body: dict[str, Any]) -> bool:
    """packages/opencode/src/provider/error.ts; pi and its successors have the same list."""
    phrases = (
        r"prompt is too long|exceeds the context window|maximum context length is \d+ tokens|"
        r"exceeds the available context size|context[_ ]length[_ ]exceeded|request entity too large"
    )
    code = body["error"].get("code")
    return bool(re.search(phrases, body["error"]["message"], re.I)) or (
        status == 413 or code == "context_length_exceeded"
    )


def _litellm_is_overflow(status: int, body: dict[str, Any]) -> bool:
    """litellm_core_utils/exception_mapping_utils.py, in 1.106.2."""
    phrases = ("this model's maximum context length is", "exceeds the available context size",
               "prompt is too long")  # fmt: skip
    return any(phrase in body["error"]["message"].lower() for phrase in phrases)


def _claude_code_compacts(status: int, body: dict[str, Any]) -> bool:
    """Claude Code 2.1.197 needs both numbers to know how much to leave out."""
    numbers = re.search(
        r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", body["error"]["message"], re.I
    )
    return status == 400 and numbers is not None and int(numbers[1]) > int(numbers[2])


def _codex_is_overflow(events: list[dict[str, Any]]) -> bool:
    """codex-rs/codex-api/src/sse/responses.rs. A status of 400 ends the turn."""
    failed = [event["response"]["error"] for event in events if event["type"] == "response.failed"]
    return [error["code"] for error in failed] == ["context_length_exceeded"]


def _claude_code_is_overloaded(status: int, body: dict[str, Any]) -> bool:
    return status == 529 or body["error"]["type"] == "overloaded_error"


# ---- a prompt that is too long


@pytest.mark.parametrize("n_over", [0, 1, 88])
@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_over_the_context_is_recognised(server: Running, path: str, n_over: int) -> None:
    n_around = _n_prompt(server, path, "")
    n_prompt = N_CTX + n_over
    answer = _post(server, path, "x" * (n_prompt - n_around))
    body = answer.json()
    error, message = body["error"], body["error"]["message"]
    assert answer.status_code == 400
    assert "shorten the prompt or raise --ctx-size" in message
    assert _opencode_is_overflow(400, body)
    assert _litellm_is_overflow(400, body)
    if path == "/v1/messages":
        assert _claude_code_compacts(400, body)
        most = min(N_CTX, n_prompt - 1)
        assert message.startswith(f"prompt is too long: {n_prompt} tokens > {most} maximum")
        assert error.keys() == {"type", "message"}
        assert error["type"] == "invalid_request_error"
        return
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (n_prompt, N_CTX)
    assert error["type"] == "exceed_context_size_error"
    assert re.search(rf"request \({n_prompt} tokens\)", message)
    assert re.search(rf"context size \({N_CTX} tokens\)", message)
    assert error["code"] == (400 if path == "/completion" else "context_length_exceeded")


def _n_prompt(server: Running, path: str, text: str) -> int:
    """The number of tokens of the shortest prompt that holds `text`."""
    told = _post(server, path, text or "x").json()
    usage = told.get("usage", {})
    counts = (usage.get("prompt_tokens"), usage.get("input_tokens"), told.get("tokens_evaluated"))
    return next(n for n in counts if n is not None) - (not text)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_says_so_before_the_prompt_is_read(server: Running, path: str) -> None:
    answer = _post(server, path, "x" * 600, stream=True)
    if path != "/v1/responses":
        assert answer.status_code == 400
        assert answer.json() == _post(server, path, "x" * 600).json()
        return
    events = _events(answer.text)
    assert answer.status_code == 200
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress", "response.failed")
    ]
    assert _codex_is_overflow(events)
    whole = _post(server, path, "x" * 600).json()["error"]
    assert events[-1]["response"]["error"]["message"] == whole["message"]
    assert events[-1]["response"]["status"] == "failed"


@pytest.mark.parametrize("path", PATHS)
def test_a_text_that_was_not_counted_says_its_least_number(server: Running, path: str) -> None:
    answer = _post(server, path, "x" * (N_CTX * 256 + 1))
    body = answer.json()
    assert answer.status_code == 400
    assert _opencode_is_overflow(400, body)
    assert "at least 513 tokens" in body["error"]["message"]
    if path == "/v1/messages":
        assert _claude_code_compacts(400, body)


def test_counting_such_a_prompt_says_the_same(server: Running) -> None:
    text = "x" * (N_CTX * 256 + 1)
    for path, counting in (
        ("/v1/messages", "/v1/messages/count_tokens"),
        ("/v1/chat/completions", "/v1/chat/completions/input_tokens"),
        ("/v1/responses", "/v1/responses/input_tokens"),
    ):
        body = _asked(text)[path][0]
        counted = http.post(server.url + counting, json=body)
        assert counted.json() == http.post(server.url + path, json=body).json()


@given(st.integers(1, 10**7), st.integers(1, 10**7), st.sampled_from(Api), st.booleans())
def test_every_pair_of_numbers_is_recognised(
    n_ctx: int, n_over: int, api: Api, is_lower_bound: bool
) -> None:
    problem = Problem(
        *("PromptTooLong", "x", 400, "exceed_context_size_error"),
        n_prompt_tokens=n_ctx + n_over - 1,
        n_ctx=n_ctx,
        event=Event.PROMPT_TOO_LONG,
        is_lower_bound=is_lower_bound,
    )
    body = error_body(problem, api)
    assert _opencode_is_overflow(400, body)
    assert api is not Api.MESSAGES or _claude_code_compacts(400, body)


# ---- a body that is too large


@pytest.mark.parametrize("path", PATHS)
def test_a_body_over_the_context_is_recognised(server: Running, path: str) -> None:
    answer = _post(server, path, "x" * (2**20 + 2 * N_CTX * 256))
    body = answer.json()
    assert answer.status_code == 413
    assert _opencode_is_overflow(413, body)
    assert "--ctx-size" in body["error"]["message"]
    if path == "/v1/messages":  # Claude Code compacts at these words, and else drops media
        assert "context window" in body["error"]["message"]
        assert body["error"]["type"] == "request_too_large"
        assert _litellm_is_overflow(413, body)
    elif path != "/completion":
        assert body["error"]["code"] == "context_length_exceeded"


def test_a_body_over_the_limit_of_all_bodies_does_not_blame_the_context() -> None:
    problem = Problem("BadRequest", "over 9 bytes", 413, "x", event=Event.BODY_TOO_LARGE)
    for api in Api:
        told = refusal_of(problem, api)
        assert told.status == 413
        assert "context" not in told.message
        assert "over 9 bytes" in told.message
    assert refusal_of(problem, Api.MESSAGES).type == "request_too_large"


# ---- the end of the context


@pytest.mark.parametrize("limit", [None, 10**9])
@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_the_context_cuts_says_so(
    server: Running, path: str, limit: int | None
) -> None:
    """A limit larger than the room is accepted: clients send one for every context."""
    name = _asked("")[path][1]
    if path == "/v1/messages" and limit is None:
        limit = 10**6  # it is required
    fields = {} if limit is None else {name: limit}
    told = _post(server, path, "x" * 480, **fields).json()
    if path == "/v1/messages":
        assert told["stop_reason"] == "model_context_window_exceeded"
        events = _events(_post(server, path, "x" * 480, **fields, stream=True).text)
        (ending,) = [event["delta"] for event in events if event["type"] == "message_delta"]
        assert ending["stop_reason"] == "model_context_window_exceeded"
    elif path == "/v1/responses":
        assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    elif path == "/completion":
        assert (told["truncated"], told["stop_type"]) == (True, "limit")
    else:
        assert told["choices"][0]["finish_reason"] == "length"


def test_an_answer_that_its_own_limit_cuts_does_not_blame_the_context(server: Running) -> None:
    assert _post(server, "/v1/messages", "x", max_tokens=2).json()["stop_reason"] == "max_tokens"
    native = _post(server, "/completion", "x", n_predict=2).json()
    assert (native["truncated"], native["stop_type"]) == (False, "limit")


# ---- a server that cannot answer now


@pytest.fixture(scope="module")
def full() -> Iterator[Running]:
    """A server without a queue, whose only slot is taken for the whole test."""
    running = Running(max_queue=0)
    running.wait_until_healthy()
    body = {"prompt": "[slow][forever]", "stream": True}
    with http.stream("POST", running.url + "/v1/completions", json=body) as busy:
        assert busy.status_code == 200
        eventually(lambda: bool(running.props()["requests_processing"]))
        yield running
    running.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_full_queue_asks_clients_to_come_again(full: Running, path: str, stream: bool) -> None:
    answer = _post(full, path, "x", stream=stream)
    body = answer.json()
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 1
    assert "--max-queue" in body["error"]["message"]
    if path == "/v1/messages":
        assert answer.status_code == 529
        assert _claude_code_is_overloaded(529, body)
        assert body["error"]["message"].startswith("Overloaded")  # a rule of LiteLLM
        return
    assert answer.status_code == 503
    assert body["error"]["type"] == "unavailable_error"
    # Codex ends the turn at these codes, and retries a 503 with others.
    assert body["error"]["code"] not in ("server_is_overloaded", "slow_down")


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_is_loading_asks_clients_to_come_again(
    start_server: StartServer, path: str
) -> None:
    server = start_server(FakeFactory(load_s=1.0), healthy=False)
    answer = _post(server, path, "x")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["message"] == "Loading model"
    is_messages = path == "/v1/messages"
    assert error["type"] == ("overloaded_error" if is_messages else "unavailable_error")


# ---- a wrong model, a wrong key


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model_is_named(start_server: StartServer, path: str) -> None:
    server = start_server(strict_model=True)
    answer = _post(server, path, "x", model="gpt-9")
    error = answer.json()["error"]
    assert answer.status_code == 404
    assert "'gpt-9'" in error["message"]
    if path == "/v1/messages":  # Claude Code asks for another model at "model:"
        assert error["type"] == "not_found_error"
        assert error["message"].startswith("model: ")
    elif path != "/completion":
        assert error["code"] == "model_not_found"
    listed = http.get(f"{server.url}/v1/models/gpt-9")
    assert (listed.status_code, listed.json()["error"]["code"]) == (404, "model_not_found")


def test_an_unknown_one_of_several_models_is_named() -> None:
    server = RunningModels({"one": FakeFactory(name="one")})
    try:
        for path in PATHS:
            answer = _post(server, path, "x", model="gpt-9")
            error = answer.json()["error"]
            assert answer.status_code == (404 if path == "/v1/messages" else 400), path
            assert "model 'gpt-9' not found" in error["message"]
            if path == "/v1/messages":
                assert error["message"].startswith("model: ")
            elif path != "/completion":
                assert error["code"] == "model_not_found"
    finally:
        server.stop()


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer no"}, {"X-Api-Key": "no"}])
def test_a_wrong_key_is_recognised(start_server: StartServer, headers: dict[str, str]) -> None:
    server = start_server(access=AccessRules(keys=("yes",)))
    for path in PATHS:
        body = _asked("x")[path][0]
        answer = http.post(server.url + path, json=body, headers=headers)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert error["type"] == "authentication_error"
        if path == "/v1/messages":  # Claude Code compares the whole text
            assert answer.text == (
                '{"type":"error","error":{"type":"authentication_error",'
                '"message":"invalid x-api-key"}}'
            )
        else:
            assert error["message"].startswith("Invalid API Key")
            assert error["code"] == (401 if path == "/completion" else "invalid_api_key")


# ---- the table


def test_paths_belong_to_their_api() -> None:
    assert api_of("/v1/messages/count_tokens") is Api.MESSAGES
    assert api_of("/v1/messagesx") is Api.NATIVE
    assert api_of("/responses/input_tokens") is Api.RESPONSES
    assert api_of("/chat/completions") is Api.OPENAI
    assert api_of("/infill") is api_of("/models") is Api.NATIVE


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 415, 500, 501, 503])
def test_every_other_problem_keeps_its_status_and_words(status: int) -> None:
    problem = Problem("E", "why {not}", status, "some_error")
    for api in Api:
        told = refusal_of(problem, api)
        assert (told.status, told.message) == (status, "why {not}")
        assert api is Api.MESSAGES or (told.type, told.code) == ("some_error", status)
