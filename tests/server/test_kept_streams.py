"""Streams that are kept for clients that come back: over real sockets, with a fake generator."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

import pytest
from running import Running, eventually, http
from starlette.types import Message, Receive, Scope, Send

from offload.errors import NotSupported
from specoffload.server.api.kept import KeptStreams
from specoffload.server.engine.messages import RequestFailed


def _id() -> str:
    return secrets.token_urlsafe(16)


def _asked(server: Running, stream_id: str, text: str, n_tokens: int = 20) -> dict[str, Any]:
    """Arguments of httpx for a streamed chat under this id."""
    messages = [{"role": "user", "content": text}]
    return {
        "method": "POST",
        "url": server.url + "/v1/chat/completions",
        "json": {"messages": messages, "max_tokens": n_tokens, "stream": True},
        "headers": {"X-Stream-Id": stream_id},
    }


def _at(server: Running, stream_id: str) -> str:
    return f"{server.url}/v1/streams/{stream_id}"


def _is_idle(server: Running) -> bool:
    return bool(server.props()["requests_processing"] == 0)


def test_a_kept_stream_is_the_plain_one_and_can_be_read_again(server: Running) -> None:
    stream_id = _id()
    first = http.request(**_asked(server, stream_id, "hello"))
    assert first.status_code == 200
    assert first.content.endswith(b"data: [DONE]\n\n")
    for _ in range(2):
        again = http.get(_at(server, stream_id))
        assert again.content == first.content
        assert again.headers["content-type"] == first.headers["content-type"]
    plain = _asked(server, stream_id, "hello")
    del plain["headers"]
    assert _texts(http.request(**plain).text) == _texts(first.text)


def _texts(stream: str) -> list[str]:
    """The text parts of a stream of chat chunks."""
    data = [
        line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: {")
    ]
    choices = [choice for line in data for choice in json.loads(line)["choices"]]
    return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]


def test_an_answer_goes_on_without_its_reader(server: Running) -> None:
    stream_id = _id()
    with http.stream(**_asked(server, stream_id, "[slow] hi", 40)) as answer:
        next(answer.iter_bytes())
    again = http.get(_at(server, stream_id))  # from its beginning, to its end
    assert again.content.endswith(b"data: [DONE]\n\n")
    assert b'"role": "assistant"' in again.content or b'"role":"assistant"' in again.content


def test_two_readers_get_the_same(server: Running) -> None:
    stream_id = _id()
    with http.stream(**_asked(server, stream_id, "[slow] hi", 40)) as answer:
        parts = answer.iter_bytes()
        first = next(parts)
        other = http.get(_at(server, stream_id)).content
        assert first + b"".join(parts) == other


def test_a_cancelled_stream_frees_its_slot_and_ends_for_its_readers(server: Running) -> None:
    stream_id = _id()
    with http.stream(**_asked(server, stream_id, "[forever] [slow] hi", 400)) as answer:
        parts = answer.iter_bytes()
        next(parts)
        assert http.delete(_at(server, stream_id)).status_code == 204
        assert b"[DONE]" not in b"".join(parts)
    eventually(lambda: _is_idle(server))
    for request in (http.get, http.delete):
        answer = request(_at(server, stream_id))
        assert answer.status_code == 404
        assert "no stream has this id" in answer.json()["error"]["message"]


def test_without_an_id_leaving_cancels_as_before(server: Running) -> None:
    asked = _asked(server, "", "[forever] [slow] hi", 400)
    del asked["headers"]
    with http.stream(**asked) as answer:
        next(answer.iter_bytes())
    eventually(lambda: _is_idle(server))


def test_ids_that_could_be_guessed_or_are_in_use_are_refused(server: Running) -> None:
    for bad in ("1", "a" * 65, "a" * 21 + "/"):
        refused = http.request(**_asked(server, bad, "hello"))
        assert refused.status_code == 400
        assert "22 to 64" in refused.json()["error"]["message"]
    stream_id = _id()
    http.request(**_asked(server, stream_id, "hello"))
    assert http.request(**_asked(server, stream_id, "hello")).status_code == 409
    assert _is_idle(server)


def test_a_refused_request_has_its_status_for_every_reader(server: Running) -> None:
    stream_id = _id()
    first = http.request(**_asked(server, stream_id, "word " * 5000))
    assert first.status_code == 400
    assert http.get(_at(server, stream_id)).status_code in (400, 404)


# ---- without a server


_SCOPE: Scope = {"type": "http", "state": {}}


async def _read(app: Any, taken: list[Message], *, leaves: asyncio.Event | None = None) -> None:
    async def receive() -> Message:
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        taken.append(message)

    await app(_SCOPE, receive, send)


def _begun(log: list[str]) -> Any:
    """An answer that sends its header and then nothing, until its client leaves."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        log.append((await receive())["type"])

    return answer


def test_a_stream_is_cancelled_when_it_had_no_reader_for_its_time() -> None:
    async def run() -> None:
        log: list[str] = []
        streams = KeptStreams(kept_s=0.02)
        stream_id, leaves, taken = _id(), asyncio.Event(), list[Message]()
        reading = _read(streams.keep(stream_id, lambda: _begun(log)), taken, leaves=leaves)
        task = asyncio.ensure_future(reading)
        await asyncio.sleep(0.1)  # longer than a stream without a reader is kept
        assert (log, len(taken)) == ([], 1)
        leaves.set()
        await task
        while not log:
            await asyncio.sleep(0.01)
        assert log == ["http.disconnect"]
        with pytest.raises(RequestFailed):
            streams.find(stream_id)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_full_house_forgets_streams_that_have_ended_first() -> None:
    async def ended(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def run() -> None:
        streams = KeptStreams()
        first = _id()
        await _read(streams.keep(first, lambda: ended), [])
        for _ in range(63):
            streams.keep(_id(), lambda: ended)
        streams.keep(_id(), lambda: ended)  # takes the place of the first
        with pytest.raises(RequestFailed):
            streams.find(first)
        with pytest.raises(RequestFailed) as refused:
            streams.keep(_id(), lambda: ended)
        assert refused.value.problem.http_status == 503

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_error_of_an_answer_reaches_its_reader() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise NotSupported("no")

    async def run() -> None:
        with pytest.raises(NotSupported):
            await _read(KeptStreams().keep(_id(), lambda: broken), [])

    asyncio.run(asyncio.wait_for(run(), 30))
