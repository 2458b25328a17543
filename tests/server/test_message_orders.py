"""Conversations that Qwen3.5's template refuses as they are, by all three APIs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_generator import FakeFactory
from running import Running, http

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "templates" / "Qwen3.5-4B.jinja"
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
BLUE = "Answer BLUE"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    source = TEMPLATE.read_text(encoding="utf-8")
    running = Running(FakeFactory(chat_template=source, n_ctx=8192))
    running.wait_until_healthy()
    yield running
    running.stop()


def _post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(server.url + path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _system(text: str = BLUE, role: str = "system") -> dict[str, str]:
    return {"role": role, "content": text}


def test_a_system_message_may_be_the_last(server: Running) -> None:
    """llama.cpp #27367, ollama #17774."""
    messages = [USER, ANSWER, USER, _system()]
    counted = _post(server, "/v1/messages/count_tokens", messages=messages)
    less = _post(server, "/v1/messages/count_tokens", messages=messages[:3])
    assert counted["input_tokens"] == less["input_tokens"] + len("\n\n" + BLUE)
    assert _post(server, "/v1/messages", messages=messages, max_tokens=9)["content"]
    prompt = _post(server, "/apply-template", messages=messages)["prompt"]
    assert prompt.endswith(
        f"<|im_start|>user\nHi\n\n{BLUE}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_a_later_system_message_joins_the_users_and_the_text_before_stays(server: Running) -> None:
    messages = [_system("Be brief."), USER, ANSWER]
    before = _post(
        server, "/apply-template", messages=messages, continue_final_message=False,
        add_generation_prompt=False,
    )["prompt"]  # fmt: skip
    prompt = _post(server, "/apply-template", messages=[*messages, _system(), USER])["prompt"]
    assert f"<|im_start|>user\n{BLUE}\n\nHi<|im_end|>" in prompt
    assert prompt.startswith(before[: before.index("assistant")])
    assert _post(server, "/v1/chat/completions", messages=[*messages, _system(), USER], n=1)


def test_instructions_and_a_developers_message_are_one_system_message(server: Running) -> None:
    items = [_system("Be kind.", "developer"), USER]
    answer = _post(server, "/v1/responses", instructions="Be brief.", input=items)
    assert answer["status"] in ("completed", "incomplete")


def test_an_answer_that_the_limit_cut_in_its_arguments_is_taken_back(server: Running) -> None:
    """llama.cpp #25510: it blocked the conversation for good."""
    function = {"name": "f", "arguments": '{"city": "Zür'}
    calls = [{"id": "a", "type": "function", "function": function}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [USER, called, {"role": "tool", "tool_call_id": "a", "content": "no"}]
    prompt = _post(server, "/apply-template", messages=messages)["prompt"]
    assert "<parameter=city>\nZür\n</parameter>" in prompt


def test_a_thread_that_a_server_would_keep_is_refused_so_that_the_client_sends_all(
    server: Running,
) -> None:
    """anthropic 2.14's runner of tools goes on without threads if it reads this code."""
    asked = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = http.post(server.url + "/v1/messages", json={**asked, "thread": thread})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith("thread: this server keeps no conversations")
        assert error["details"]["error_code"] == "thread_unsupported_request"
    answer = http.post(server.url + "/v1/messages", json={**asked, "thread": None})
    assert answer.status_code == 200
