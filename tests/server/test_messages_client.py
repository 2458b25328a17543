"""The official clients of the Messages API and the Responses API work over real sockets."""

from __future__ import annotations

from typing import Any

import pytest
from fake_generator import TAIL
from running import Running, http

anthropic = pytest.importorskip(
    "anthropic", reason="anthropic is not installed: scripts/test-extras runs this"
)
pytestmark = pytest.mark.extra("anthropic")

ASKED: list[Any] = [{"role": "user", "content": "hi"}]


def _client(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20)


def test_a_message_is_answered(server: Running) -> None:
    with _client(server) as client:
        message = client.messages.create(model="any", max_tokens=200, messages=ASKED)
    assert message.content[0].text.endswith(TAIL)
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 0


def test_a_stream_adds_up_to_the_message(server: Running) -> None:
    asked = {"model": "any", "max_tokens": 200, "messages": ASKED}
    with _client(server) as client, client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    assert text.endswith(TAIL)
    assert final.usage.output_tokens > 0


def test_stop_sequences_and_limits_are_told(server: Running) -> None:
    with _client(server) as client:
        cut = client.messages.create(
            model="any", max_tokens=200, messages=ASKED, stop_sequences=["ve"]
        )
        short = client.messages.create(model="any", max_tokens=2, messages=ASKED)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "ve")
    assert short.stop_reason == "max_tokens"


def test_tokens_are_counted(server: Running) -> None:
    with _client(server) as client:
        few = client.messages.count_tokens(model="any", messages=ASKED)
        more = client.messages.count_tokens(model="any", messages=ASKED, system="Be brief.")
    assert 0 < few.input_tokens < more.input_tokens


def test_an_error_has_anthropics_shape_and_the_client_its_exception(server: Running) -> None:
    with _client(server) as client, pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="any", max_tokens=0, messages=ASKED)
    answer = http.post(server.url + "/v1/messages", json={"messages": [], "max_tokens": 1})
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
