"""Images in the results of tools: an agent's session goes on, and operator and client are told."""

from __future__ import annotations

from typing import Any

import pytest
from running import Running, eventually, http

IMAGE = "iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": IMAGE}
DATA_URL = f"data:image/png;base64,{IMAGE}"
FUNCTION = {"name": "look", "arguments": "{}"}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 300,
        "messages": [
            {"role": "user", "content": "see"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1",
                        "content": [
                            {"type": "text", "text": "found:"},
                            {"type": "image", "source": SOURCE},
                        ],
                    }
                ],
            },
        ],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "see"},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": [
                    {"type": "input_text", "text": "found:"},
                    {"type": "input_image", "image_url": DATA_URL},
                ],
            },
        ],
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "see"},
            {"role": "assistant", "tool_calls": [CALL]},
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "content": [
                    {"type": "text", "text": "found:"},
                    {"type": "image_url", "image_url": {"url": DATA_URL}},
                ],
            },
        ],
    },
}


@pytest.mark.parametrize("path", REQUESTS)
def test_an_image_of_a_tool_becomes_a_word_and_is_logged(server: Running, path: str) -> None:
    answer = http.post(server.url + path, json=REQUESTS[path])
    assert answer.status_code == 200, answer.text
    between = "\\n" if path == "/v1/messages" else ""  # its blocks are joined by line feeds
    assert f"found:{between}[image omitted]" in answer.text
    assert IMAGE not in answer.text
    assert "image in the result of call_1" in answer.headers["x-ignored-parameters"]
    start = f"127.0.0.1 POST {path} 200 "
    eventually(lambda: any(line.startswith(start) for line in server.lines))
    said = next(line for line in server.lines if line.startswith(start))
    assert ": omitted: image (1) · #" in said


def test_an_image_of_the_user_is_refused(server: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": DATA_URL}}
    for role in ("user", "system"):
        body = {"messages": [{"role": role, "content": [image]}]}
        answer = http.post(server.url + "/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "image input is not supported" in answer.json()["error"]["message"]
    block = {"type": "image", "source": SOURCE}
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": [block]}]}
    assert http.post(server.url + "/v1/messages", json=body).status_code == 400


def test_media_that_are_left_out_do_not_count_towards_the_limit_of_a_body(server: Running) -> None:
    """The limit is that of a text, of which this model reads 1 MiB and little more."""
    large = DATA_URL + 4_000_000 * "A"
    parts = [{"type": "image_url", "image_url": {"url": large}}]
    body = {"messages": [{"role": "tool", "tool_call_id": "a", "content": parts}]}
    answer = http.post(server.url + "/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    body = {"messages": [{"role": "user", "content": 4_000_000 * "A"}]}
    answer = http.post(server.url + "/v1/chat/completions", json=body)
    assert answer.status_code == 413, answer.text
