"""The short way of a token through the API process: frames, lines, writes past ASGI's `send`."""

from __future__ import annotations

import json
import pickle
import socket

import pytest
from fake_generator import FakeFactory
from hypothesis import given
from hypothesis import strategies as st
from running import StartServer, http

from specoffload.server.api.wire import TextChoice, TextCompletion, server_sent
from specoffload.server.engine.channel import Frames, channels, packed
from specoffload.server.telling.text_line import MARK, TextLine

MESSAGES = st.lists(st.one_of(st.binary(max_size=50), st.text(max_size=50), st.integers()))


@given(MESSAGES, st.lists(st.integers(min_value=1, max_value=40), min_size=1))
def test_messages_arrive_whole_however_their_bytes_are_cut(
    messages: list[object], sizes: list[int]
) -> None:
    data = b"".join(map(packed, messages))
    frames, found, at, turn = Frames(), [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += frames.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert found == messages


def test_half_a_message_is_not_one_and_the_end_is_told() -> None:
    a, b = channels()
    a.send("whole")
    assert b.received() == ["whole"]
    assert b.received() == []
    a._socket.sendall(packed("half")[:-1])
    assert b.received() == []
    a.close()
    with pytest.raises(EOFError):
        b.received()
    b.close()


def test_bytes_that_are_no_message_are_told() -> None:
    with pytest.raises(pickle.UnpicklingError):
        Frames().feed((3).to_bytes(8, "big") + b"abc")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def chunk(text: str, model: str) -> str:
    """The JSON of a part of a text, by pydantic."""
    choice = TextChoice(index=0, text=text, logprobs=None, finish_reason=None)
    return TextCompletion(
        id="x", object="text_completion", created=1, model=model, choices=[choice]
    ).to_json()


@given(TEXTS, st.one_of(st.sampled_from([MARK, f'"{MARK}"', 'a "model"']), TEXTS))
def test_a_line_is_the_json_that_pydantic_makes(text: str, model: str) -> None:
    assert TextLine(chunk(MARK, model)).sent(text) == server_sent(chunk(text, model))


def ask(url: str, version: str) -> tuple[bytes, bytes]:
    """Head and body of a streamed answer, as they come over the socket."""
    body = json.dumps({"prompt": "hello there, " * 20, "stream": True}).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        head = f"POST /v1/completions HTTP/{version}\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        parts = []
        while part := client.recv(65536):
            parts.append(part)
    answer_head, _, answer = b"".join(parts).partition(b"\r\n\r\n")
    return answer_head, answer


def text_of(stream: str) -> str:
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_both_versions_of_http_stream_the_text_that_is_given_whole(
    start_server: StartServer,
) -> None:
    server = start_server(FakeFactory())
    whole = http.post(server.url + "/v1/completions", json={"prompt": "hello there, " * 20}).json()
    head, old = ask(server.url, "1.0")
    assert b"chunked" not in head.lower()
    assert text_of(old.decode()) == whole["choices"][0]["text"]
    head, new = ask(server.url, "1.1")
    assert b"transfer-encoding: chunked" in head.lower()
    parts = []
    while new:
        size, _, rest = new.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        new = rest[int(size, 16) + 2 :]
    assert parts[-1] == b""
    assert text_of(b"".join(parts).decode()) == whole["choices"][0]["text"]
