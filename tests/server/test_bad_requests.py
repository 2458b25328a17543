"""Every request that cannot be served gets a 4xx status and one sentence."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from running import Running, StartServer, http

from specoffload.server.access import AccessRules
from specoffload.server.api.body import ALIASES

JSON = {"Content-Type": "application/json"}

USER = [{"role": "user", "content": "hi"}]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [[]]}, "prompt is empty"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, -1]}, "prompt[1] is token -1"),
    ({"prompt": [1, 257]}, "vocabulary has tokens 0 to 256"),
    ({"prompt": "x" * 600}, "request (601 tokens) exceeds the available context size (512"),
    ({"prompt": "[refuse]"}, "the fake refuses this prompt"),
    ({"prompt": "x", "max_tokens": -2}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens"),
    ({"prompt": "x", "temperature": -0.1}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 1.1}, "top_p"),
    ({"prompt": "x", "min_p": -1}, "min_p"),
    ({"prompt": "x", "seed": "s"}, "seed"),
    ({"prompt": "x", "stop": [1]}, "stop"),
    ({"prompt": "x", "stop": ["a"] * 300}, "stop has 300 texts"),
    ({"prompt": "x", "stop": ["a" * 2000]}, "of up to 2000 letters"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "n": 0}, "n: "),
    ({"prompt": "x", "n": True}, "n: "),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "x", "repeat_last_n": -2}, "repeat_last_n"),
    ({"prompt": "x", "grammar": "r", "json_schema": {"type": "object"}}, "grammar and json_schema"),
    ({"prompt": "x", "grammar": 7}, "grammar"),
]

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHOICE_OF_G = {"type": "function", "function": {"name": "g"}}

ODD_TOOL = {
    "type": "function",
    "function": {
        "name": "mail",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string", "pattern": "^(?!\\.)[a-z]+$"}},
        },
    },
}

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "content is missing"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role: Input should be 'system'"),
    ({"messages": [{"role": "user", "content": 3}]}, "content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "image input is not supported",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        "messages[0]: nothing of it can be read; its parts are of type smell",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0]: a call needs an object 'function' or 'custom'",
    ),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "tool_calls"),
    ({"messages": [{**USER[0], "tool_calls": [CALL]}]}, "only the assistant has tool_calls"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0]: type 'function' is"),
    (
        {"messages": USER, "tools": [{"type": "web_search"}]},
        "tools[0]: type 'web_search' is not supported; define a function",
    ),
    (
        {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "f"}}]},
        "tools[0]: type 'custom' is not supported",
    ),
    (
        {
            "messages": USER,
            "tools": [TOOL],
            "tool_choice": {"type": "custom", "custom": {"name": "f"}},
        },
        "tool_choice: type 'custom' is not supported",
    ),
    (
        {
            "messages": USER,
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [{"type": "mcp", "server_label": "x"}]},
            },
        },
        "tool_choice.allowed_tools.tools[0]: type 'mcp' is not supported",
    ),
    (
        {"messages": USER, "tools": [ODD_TOOL], "tool_choice": "required"},
        "tool 'mail': #/properties/to/pattern: look-ahead",
    ),
    (
        {"messages": USER, "json_schema": {"properties": {"n": {"const": 2**53 + 1}}}},
        "#/properties/n/const: the number 9007199254740993 cannot be followed exactly",
    ),
    ({"messages": USER, "tools": [TOOL, TOOL]}, "two of them are called 'f'"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tool name"),
    ({"messages": USER, "tools": [TOOL], "tool_choice": "maybe"}, "tool_choice 'maybe'"),
    ({"messages": USER, "tools": [TOOL], "tool_choice": CHOICE_OF_G}, "no tool is called 'g'"),
    ({"messages": USER, "tool_choice": "required"}, "there are no tools"),
    ({"messages": USER, "tools": [TOOL], "tool_choice": "required", "grammar": "r"}, "exclude"),
    ({"messages": USER, "reasoning_format": "loud"}, "reasoning_format: Input should be 'auto'"),
    ({"messages": USER, "chat_template_kwargs": 3}, "chat_template_kwargs"),
    ({"messages": USER, "n": 0}, "n:"),
    ({"messages": USER, "n": 65}, "n:"),
    ({"messages": USER, "response_format": {"type": "xml"}}, "response_format: type 'xml'"),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, "json_schema.schema"),
    ({"messages": USER, "logprobs": 3}, "logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "context size (512 tokens)"),
]


def _check(response: httpx.Response, status: int, words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    codes = {400: "context_length_exceeded", 413: "context_length_exceeded",
             404: "model_not_found", 401: "invalid_api_key"}  # fmt: skip
    assert error["code"] in (status, codes.get(status))
    assert words in error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(("body", "words"), BAD_COMPLETIONS)
def test_a_bad_completion_request_is_a_400_that_names_the_fault(
    server: Running, body: dict[str, Any], words: str
) -> None:
    error = _check(http.post(server.url + "/v1/completions", json=body), 400, words)
    assert error["type"] in ("invalid_request_error", "exceed_context_size_error")


@pytest.mark.parametrize(("body", "words"), BAD_CHATS)
def test_a_bad_chat_request_is_a_400_that_names_the_fault(
    server: Running, body: dict[str, Any], words: str
) -> None:
    _check(http.post(server.url + "/v1/chat/completions", json=body), 400, words)


@pytest.mark.parametrize("name", [*ALIASES])
def test_a_bad_value_is_named_as_the_request_named_it(server: Running, name: str) -> None:
    body = {"messages": USER, name: [{}]}
    message = http.post(server.url + "/v1/chat/completions", json=body).json()["error"]["message"]
    assert message.startswith((f"{name}:", f"{name} ", f"{name}.")), message


def test_our_name_is_said_if_the_request_has_it_too(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": -2, "n_predict": 3}
    message = http.post(server.url + "/completion", json=body).json()["error"]["message"]
    assert message.startswith("max_tokens: ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 5000],
)
def test_a_body_that_is_not_a_json_object_is_a_400(server: Running, path: str, raw: bytes) -> None:
    _check(http.post(server.url + path, content=raw, headers=JSON), 400, "")


def test_a_streamed_request_that_is_refused_has_its_status_and_not_an_event(
    server: Running,
) -> None:
    body = {"prompt": "x" * 600, "stream": True}
    response = http.post(server.url + "/v1/completions", json=body)
    _check(response, 400, "context size (512 tokens)")
    assert response.headers["content-type"] == "application/json"


def test_a_prompt_over_the_context_tells_both_numbers(server: Running) -> None:
    response = http.post(server.url + "/v1/completions", json={"prompt": "x" * 600})
    error = _check(response, 400, "shorten the prompt or raise --ctx-size")
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (601, 512)


def test_a_prompt_that_leaves_room_for_one_token_is_served(server: Running) -> None:
    body = {"prompt": [120] * 511}
    response = http.post(server.url + "/v1/completions", json=body)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 1
    assert response.json()["choices"][0]["finish_reason"] == "length"
    body = {"prompt": [120] * 512}
    _check(http.post(server.url + "/v1/completions", json=body), 400, "512 tokens")


def test_a_chat_that_asks_for_no_token_has_an_empty_answer(server: Running) -> None:
    body = {"messages": USER, "max_tokens": 0}
    answer = http.post(server.url + "/v1/chat/completions", json=body).json()
    [choice] = answer["choices"]
    assert choice["message"]["content"] in ("", None)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_an_unknown_path_or_method_has_the_same_error_shape(server: Running) -> None:
    error = _check(http.get(server.url + "/v1/nothing"), 404, "/v1/nothing")
    assert error["type"] == "not_found_error"
    response = http.get(server.url + "/v1/completions")
    _check(response, 405, "GET /v1/completions")
    assert response.headers["allow"] == "POST"
    _check(http.get(server.url + "/v1/models/other"), 404, "this server has 'fake'")


def test_a_body_over_what_fits_the_context_is_a_413(server: Running) -> None:
    limit = 2**20 + 2 * 512 * 256
    body = b'{"prompt": "x"}' + b" " * (limit - 14)
    response = http.post(server.url + "/v1/completions", content=body, headers=JSON)
    _check(response, 413, f"over {limit} bytes")
    response = http.post(server.url + "/v1/completions", content=body[:-1], headers=JSON)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "number", ["1" * 5_000, "-" + "9" * 500_000, "1e400", "NaN", "Infinity", "0x10", "01"]
)
def test_a_number_that_is_none_is_a_400(server: Running, number: str) -> None:
    for field in ("seed", "temperature", "no_such_thing"):
        raw = f'{{"prompt": "x", "{field}": {number}}}'.encode()
        response = http.post(server.url + "/v1/completions", content=raw, headers=JSON)
        if not (number == "1e400" and field == "no_such_thing"):
            _check(response, 400, "")


def test_a_long_list_of_the_wrong_kind_is_refused_at_its_first_element(server: Running) -> None:
    raw = b'{"prompt": [' + b"true," * 200_000 + b"true]}"
    error = _check(http.post(server.url + "/v1/completions", content=raw, headers=JSON), 400, "")
    assert len(error["message"]) < 1000


def test_a_key_is_wanted_where_llama_server_wants_one(start_server: StartServer) -> None:
    server = start_server(access=AccessRules(keys=("sesame",)))
    for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "Basic sesame"}):
        for path in ("/v1/models/any", "/props", "/slots"):
            error = _check(http.get(server.url + path, headers=headers), 401, "API Key")
            assert error["type"] == "authentication_error"
        for path in ("/health", "/v1/health", "/models", "/v1/models", "/"):
            assert http.get(server.url + path, headers=headers).status_code == 200, path
    with server.client(api_key="sesame") as client:
        assert client.completions.create(model="any", prompt="x").choices[0].text
