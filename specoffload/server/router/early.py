"""What a stream says while its request waits for its model, in the form of its API."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from specoffload.server.api.answers import named_events
from specoffload.server.api.life_signs import (
    CHAT_CHUNK,
    STREAM_START,
    TEXT_CHUNK,
    Pings,
    StreamStart,
    chunk_sign,
    message_head,
    native_sign,
    new_start,
    opening_of_message,
)
from specoffload.server.api.refusals import Api, Json, api_of
from specoffload.server.api.responses import response_head, signs_of_response, with_response

_PREFIXES = {Api.MESSAGES: "msg_", Api.RESPONSES: "resp_"}


class EarlyStream:
    """The events of a stream whose model did not take the request yet.

    The model's route goes on with the same id, and opens the stream only if it is not open.
    """

    def __init__(self, scope: MutableMapping[str, Any], asked: Json, model: str) -> None:
        """`asked` is the body of the request, of which nothing is checked yet."""
        path = scope["path"]
        self._api, self._asked, self._model = api_of(path), asked, model
        self._is_chat = path.endswith("chat/completions")
        prefix = _PREFIXES.get(self._api, "chatcmpl-" if self._is_chat else "cmpl-")
        self._start: StreamStart = new_start(prefix)
        scope.setdefault("state", {})[STREAM_START] = self._start
        agents = [value for name, value in scope["headers"] if name == b"user-agent"]
        self._pings = Pings(b"".join(agents[:1]).decode("latin-1"))

    def sign(self) -> bytes:
        """Return an event that says that the answer is still coming."""
        if self._api is Api.MESSAGES:
            head = message_head(self._start, self._model)
            return named_events(self._pings.next(lambda: opening_of_message(self._start, head)))
        if self._api is Api.RESPONSES:
            return named_events(signs_of_response(self._start, self._response()))
        if self._api is Api.OPENAI:
            kind = CHAT_CHUNK if self._is_chat else TEXT_CHUNK
            return chunk_sign(self._start, kind, self._model)
        return native_sign()

    def failed(self, body: bytes) -> bytes:
        """Return the events that end the stream. `body` is that of the refusal."""
        if self._api is Api.MESSAGES:
            return b"event: error\ndata: " + body + b"\n\n"
        if self._api is not Api.RESPONSES:
            return b"data: " + body + b"\n\n"
        error = json.loads(body)["error"]
        code = error["code"] if isinstance(error["code"], str) else "server_error"
        failure = {"code": code, "message": error["message"]}
        response = self._response() | {"status": "failed", "error": failure}
        opening = [] if self._start.n_events else signs_of_response(self._start, self._response())
        return named_events([*opening, with_response(self._start, "response.failed", response)])

    def _response(self) -> Json:
        return response_head(self._start, self._asked, self._model)
