"""A conversation with a server in any API: whole, in a stream, or left at any byte."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from combinations.asking import PATHS, Body, Reply, body_of, reply_of, streamed_reply
from combinations.cases import Case
from combinations.requesting import events_of, sentence_of

PATIENCE_S = 180.0  # a request that takes longer waits for ever
RAW = ("native", "completions")  # APIs whose prompt is one text


@dataclass(frozen=True)
class Conversation:
    """Earlier turns (question, answer), and a question that is not answered yet."""

    model: str
    api: str
    question: str
    turns: tuple[tuple[str, str], ...] = ()

    def answered(self, answer: str, question: str) -> Conversation:
        """The conversation with this answer and the next question."""
        turns = (*self.turns, (self.question, answer))
        return replace(self, turns=turns, question=question)

    def edited(self, question: str) -> Conversation:
        """The conversation with another question in place of its last turn."""
        return replace(self, turns=self.turns[:-1], question=question)

    @property
    def text(self) -> str:
        """The prompt of an API without messages."""
        return "".join(q + a for q, a in self.turns) + self.question

    def body(self, n_predict: int, api: str = "") -> Body:
        """The body of its request."""
        api = api or self.api
        if api in RAW:
            limit = "n_predict" if api == "native" else "max_tokens"
            return {
                "model": self.model,
                "prompt": self.text,
                limit: n_predict,
                "temperature": 0,
            }
        turns = [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        body = body_of(Case.of("request", api=api), self.question, turns)
        limit = "max_output_tokens" if api == "responses" else "max_tokens"
        return body | {"model": self.model, limit: n_predict}


@dataclass(frozen=True)
class Refusal:
    """The server refused a request, or lost it, with one sentence."""

    status: int
    sentence: str


class Talker:
    """Sends requests to the server at `url`. Raises AssertionError for what must not happen."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def close(self) -> None:
        self.http.close()

    def post(self, path: str, body: Body) -> httpx.Response:
        """Answer of a request. As long as it is told to come back, it does."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            answer = self.http.post(path, json=body)
            if answer.status_code not in (503, 529):
                return answer
            assert "Retry-After" in answer.headers, answer.text
            assert time.monotonic() < end_s, f"still refused after {PATIENCE_S} s: {answer.text}"
            time.sleep(0.3)

    def ask(self, api: str, body: Body, *, streamed: bool = False) -> Reply:
        """An answer. Raises AssertionError for a refusal."""
        found = self.tried(api, body, streamed=streamed)
        assert isinstance(found, Reply), f"{api}: {found}"
        return found

    def tried(self, api: str, body: Body, *, streamed: bool = False) -> Reply | Refusal:
        """An answer or a refusal. A server that is loading or busy is asked again."""
        more: Body = {"stream": True} if streamed else {}
        if streamed and api in ("chat", "completions"):
            more["stream_options"] = {"include_usage": True}
        answer = self.post(PATHS[api], body | more)
        if answer.status_code != 200:
            return Refusal(answer.status_code, sentence_of(answer.json()))
        if streamed:
            if lost := error_of(answer.text):
                return Refusal(500, lost)
            return streamed_reply(api, [*events_of(answer.text)])
        return reply_of(api, answer.json())

    def prompt_of(self, talk: Conversation) -> str:
        """The text that the model reads."""
        if talk.api in RAW:
            return talk.text
        answer = self.post("/apply-template", talk.body(1, "chat"))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["prompt"])

    def leave(self, api: str, body: Body, n_sent: int, n_read: int) -> None:
        """Send a request's first `n_sent` bytes, read `n_read` bytes of its stream, and leave."""
        at = urlsplit(self.url)
        content = json.dumps(body | {"stream": True}).encode()
        head = f"POST {PATHS[api]} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Length: {len(content)}"
        sent = f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + content
        with socket.create_connection((at.hostname, at.port), PATIENCE_S) as client:
            client.sendall(sent[:n_sent])
            if n_sent < len(sent):
                return
            with suppress(TimeoutError):
                client.settimeout(20)
                while n_read > 0 and (got := client.recv(n_read)):
                    n_read -= len(got)

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, f"{path}: {answer.text}"
        return answer.json()


def error_of(stream: str) -> str:
    """The sentence of an error's event in a stream, or an empty text."""
    for line in stream.splitlines():
        kind, _, data = line.partition(": ")
        if kind in ("data", "error") and data.startswith("{") and "error" in data:
            found = json.loads(data)
            error = found.get("error") or (found.get("response") or {}).get("error")
            if error or kind == "error":
                return sentence_of({"error": error or found})
    return ""


def numbers_of(sentence: str) -> list[int]:
    """The numbers in a sentence."""
    return [int(n) for n in re.findall(r"\d+", sentence)]
