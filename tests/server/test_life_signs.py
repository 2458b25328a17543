"""Clients get events that they count while they wait for a model, a turn, or a prompt."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_generator import TAIL, FakeFactory
from running import Running, RunningModels, eventually, http
from told_answers import ended, no_parser

from specoffload.chat.conversation import Content
from specoffload.server.api import life_signs, streaming
from specoffload.server.api.anthropic import AnthropicWording
from specoffload.server.router import waiting

CLAUDE_CODE = "claude-cli/2.1.197 (external, cli)"
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/completion"]
TEXT = "[prefill][parts]"  # 0.7 s, in which parts of the prompt are told


def _body(path: str, asked: str, **fields: Any) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"input": asked, "stream": True, **fields}
    if path.endswith("/messages") or "chat" in path:
        chat = {"messages": [{"role": "user", "content": asked}]}
        return {**chat, "max_tokens": 200, "stream": True, **fields}
    return {"prompt": asked, "stream": True, **fields}


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def _said(path: str, event: dict[str, Any]) -> str:
    """The text that an event adds to the answer."""
    if path == "/v1/responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    if path == "/v1/messages":
        return str(event.get("delta", {}).get("text", ""))
    if path == "/completion":
        return str(event["content"])
    choice = event["choices"][0] if event["choices"] else {}
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def _signs(path: str, text: str) -> list[dict[str, Any]]:
    """The events before the first text. The whole text is checked, and the ids of all events."""
    events = _events(text)
    texts = [_said(path, event) for event in events]
    assert "".join(texts).endswith(TAIL)
    ids = {e["id"] for e in events if "id" in e}
    ids |= {e["response"]["id"] for e in events if "response" in e}
    assert len(ids) <= 1
    return events[: next(at for at, said in enumerate(texts) if said)]


def _check_signs(path: str, signs: list[dict[str, Any]], n_least: int) -> None:
    if path == "/v1/messages":
        kinds = [sign["type"] for sign in signs]
        assert kinds.count("ping") >= n_least
        assert kinds.count("message_start") == 1
        return
    if path == "/v1/responses":
        kinds = [sign["type"].removeprefix("response.") for sign in signs]
        assert kinds[0] == "created"
        assert kinds.count("created") == 1
        assert kinds.count("in_progress") >= n_least
        assert [sign["sequence_number"] for sign in signs] == [*range(len(signs))]
        return
    assert len(signs) >= n_least
    for sign in signs if path != "/completion" else ():
        (choice,) = sign["choices"]
        assert choice["finish_reason"] is None
        assert choice.get("text") == "" or not choice["delta"].get("content")


def test_signs_come_at_a_third_of_the_usual_limits() -> None:
    assert life_signs.SIGN_S * 3 <= 15  # people set Codex's limit to 15 s
    assert life_signs.SIGN_S * life_signs.N_PINGS * 3 <= 300  # Claude Code's limit, without pings
    assert waiting._HEADER_PATIENCE_S == streaming._KEEP_ALIVE_S == life_signs.SIGN_S


@pytest.fixture(scope="module")
def impatient() -> Iterator[Running]:
    """A server whose clients lose patience within a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "_HEADER_PATIENCE_S", 0.1)
        patch.setattr(streaming, "_KEEP_ALIVE_S", 0.1)
        server = Running()
        server.wait_until_healthy()
        yield server
        server.stop()


@pytest.mark.parametrize("path", PATHS)
def test_events_come_while_a_prompt_is_read(impatient: Running, path: str) -> None:
    text = http.post(impatient.url + path, json=_body(path, TEXT)).text
    _check_signs(path, _signs(path, text), 3)
    assert "\n:" not in text


@pytest.mark.parametrize("path", PATHS)
def test_events_come_while_a_request_is_queued(impatient: Running, path: str) -> None:
    answers: list[httpx.Response] = []
    body = {"prompt": "[slow][forever]", "stream": True}
    url = impatient.url + path
    with http.stream("POST", impatient.url + "/v1/completions", json=body) as busy:
        assert busy.status_code == 200
        asking = threading.Thread(
            target=lambda: answers.append(http.post(url, json=_body(path, "x")))
        )
        asking.start()
        eventually(lambda: impatient.props()["requests_deferred"] == 1)
        threading.Event().wait(0.5)
    asking.join(20)
    _check_signs(path, _signs(path, answers[0].text), 3)


def test_events_come_while_pieces_add_none(impatient: Running) -> None:
    """A stop sequence that may have begun is held back, and here it never ends."""
    body = _body("/v1/completions", "[slow][say]" + "a" * 60 + "[/say]", stop=["a" * 64])
    events = _events(http.post(impatient.url + "/v1/completions", json=body).text)
    assert sum(not _said("/v1/completions", event) for event in events) > 4
    assert "".join(_said("/v1/completions", event) for event in events) == "a" * 60


# ---- Claude Code, which counts no pings


@pytest.mark.parametrize(("agent", "counted"), [(CLAUDE_CODE, 2), ("anthropic/2", 0), ("", 0)])
def test_claude_code_gets_an_event_that_it_counts(agent: str, counted: int) -> None:
    told = AnthropicWording(no_parser(), "m", user_agent=agent)
    signs = [event for _ in range(life_signs.N_PINGS * 2) for event in told.signs()]
    events = [*signs, *told.add(Content("a")), *told.finish(ended("stop"), 0)]
    kinds = [event["type"] for event in events]
    assert len([kind for kind in kinds[: len(signs)] if kind != "ping"]) == counted
    assert kinds.count("message_start") == 1
    first, *_ = [kind for kind in kinds if kind != "ping"]
    assert first == "message_start"
    deltas = [event["delta"] for event in events if event["type"] == "message_delta"]
    reasons = [delta["stop_reason"] for delta in deltas]
    assert reasons == [*[None] * max(0, counted - 1), "end_turn"]


# ---- several models


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningModels]:
    """A server of models that load for a second, one of them in vain."""
    for name in ("SIGN_S", "_HEADER_PATIENCE_S", "_NEWS_S"):
        monkeypatch.setattr(waiting, name, 0.1)
    factories = {
        "good": FakeFactory(name="good", load_s=0.8),
        "bad": FakeFactory(name="bad", load_s=0.8, bad_model=True),
    }
    server = RunningModels(factories)
    yield server
    server.stop()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("agent", ["", CLAUDE_CODE])
def test_events_come_while_a_model_loads(
    loading: RunningModels, monkeypatch: pytest.MonkeyPatch, path: str, agent: str
) -> None:
    monkeypatch.setattr(life_signs, "N_PINGS", 3)
    body = _body(path, "x", model="good")
    text = http.post(loading.url + path, json=body, headers={"User-Agent": agent}).text
    signs = _signs(path, text)
    _check_signs(path, signs, 3)
    assert ": loading good: reading weights 25%" in text
    counted = [sign["type"] for sign in signs].count("message_delta") if "messages" in path else 0
    assert (counted > 0) == (path == "/v1/messages" and bool(agent))


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_does_not_load_is_told_by_the_apis_event(
    loading: RunningModels, path: str
) -> None:
    text = http.post(loading.url + path, json=_body(path, "x", model="bad")).text
    last = _events(text)[-1]
    if path == "/v1/responses":
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        last = last["response"]
    elif path == "/v1/messages":
        assert "event: error\n" in text
        assert last["type"] == "error"
    assert "failed to load" in last["error"]["message"]


def test_a_body_that_the_model_refuses_later_is_told_by_the_apis_event(
    loading: RunningModels,
) -> None:
    bad = {"/v1/responses": {"tools": "x", "text": 3}, "/v1/messages": {"max_tokens": 0},
           "/v1/chat/completions": {"n": "x"}}  # fmt: skip
    for path, fields in bad.items():
        text = http.post(loading.url + path, json=_body(path, "x", model="good", **fields)).text
        assert (
            next(iter(fields))
            in _events(text)[-1].get("response", _events(text)[-1])["error"]["message"]
        )
        assert http.post(loading.url + "/models/unload", json={"model": "good"}).status_code == 200
        eventually(lambda: loading.statuses()["good"] == "unloaded")
