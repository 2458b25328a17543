"""Sends the requests of a case to a real server, and checks its answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx

from combinations.asking import (
    LONG,
    PATHS,
    RAW,
    SHORT,
    STOP,
    TOOL,
    WORDS,
    Body,
    Reply,
    body_of,
    raw_body,
    reply_of,
    streamed_reply,
)
from combinations.cases import Case

COUNTING = {
    "chat": "/v1/chat/completions/input_tokens", "responses": "/v1/responses/input_tokens",
    "messages": "/v1/messages/count_tokens",
}  # fmt: skip
N_CTX = 4096  # tokens of the server's context


class Refused(Exception):
    """The server answered with status 400. The text is its sentence."""


class Asker:
    """Plays cases on the server at `url`, which has the family's template."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self._marker = self._http.get("/props").json()["media_marker"]

    def close(self) -> None:
        self._http.close()

    def faults_of(self, case: Case) -> list[str]:
        """A sentence for each property that did not hold."""
        try:
            return [*self._faults(case), *self._faults_afterwards()]
        except Refused as e:
            return [f"refused: {e}"]
        except (AssertionError, KeyError, ValueError, httpx.HTTPError) as e:
            return [f"raised: {type(e).__name__}: {e}"]

    def _faults(self, case: Case) -> Iterator[str]:
        question = "Write a function that adds two numbers."
        turns: list[Any] = []
        if case["history"] in ("its own answer", "edited"):
            first = {"role": "user", "content": "def first():"}
            reply = self._whole(case, body_of(case, first["content"]))
            begun = [{"role": "assistant", "content": "def "}] if case["prefill"] == "begun" else []
            if case["history"] == "edited":
                question = "Write another function."
            elif not reply.calls:
                turns = [first, *([] if begun else _answer_of(case, reply))]
        if case["history"] == "too long":
            yield from self._check_refusal(case)
        body = body_of(case, question, turns)
        whole = self._whole(case, body)
        yield from self._check_count(case, body, whole)
        yield from self._check(case, whole, "whole")
        streamed = self._streamed(case, body)
        yield from self._check(case, streamed, "streamed")
        for name in ("text", "reasoning", "reason", "n_prompt"):
            a, b = getattr(whole, name), getattr(streamed, name)
            if a != b:
                yield f"{name} is {a!r} whole and {b!r} in a stream"
        if whole.reason == "length":
            return  # a call that was cut is whole JSON in no stream
        a, b = ([(n, json.loads(x)) for n, x in r.calls if _is_json(x)] for r in (whole, streamed))
        if a != b:
            yield f"calls are {whole.calls} whole and {streamed.calls} in a stream"

    def _check_count(self, case: Case, body: Body, reply: Reply) -> Iterator[str]:
        """Check that the prompt has as many tokens as the API that counts them says."""
        api = "chat" if case["api"] in RAW else case["api"]
        counted = self._checked(self._http.post(COUNTING[api], json=body))["input_tokens"]
        if counted != reply.n_prompt:
            yield f"{counted} tokens are counted before, and {reply.n_prompt} in the answer"

    def _check_refusal(self, case: Case) -> Iterator[str]:
        """Ask more than the context holds. Check that the refusal says both numbers."""
        try:
            self._whole(case, body_of(case, "Write one function, and another one. " * N_CTX))
        except Refused as e:
            numbers = [int(n) for n in re.findall(r"\d+", str(e))]
            if N_CTX not in numbers or max(numbers) <= N_CTX:
                yield f"the refusal of a long prompt lacks a number: {e}"
        else:
            yield "a prompt over the context is answered"

    def _faults_afterwards(self) -> Iterator[str]:
        """Check that nothing of the case goes on."""
        slots = self._http.get("/slots").json()
        if busy := [slot["id"] for slot in slots if slot["is_processing"]]:
            yield f"slots {busy} still compute after the answer"

    def _check(self, case: Case, reply: Reply, how: str) -> Iterator[str]:
        limit = LONG if case["length"] == "long" else SHORT
        if not 0 < reply.n_answer <= limit:
            yield f"{how}: {reply.n_answer} tokens of at most {limit} are counted"
        if reply.n_prompt < 5:
            yield f"{how}: the prompt has {reply.n_prompt} tokens"
        if reply.reason != "length":
            yield from self._check_complete(case, reply, how)
        if case["api"] in RAW:
            return  # reasoning is a part of the text
        if case["reasoning"] == "limit 0" and len(reply.reasoning.strip()) > 0:
            yield f"{how}: it reasons {reply.reasoning[:60]!r}"
        if case["stop"] == "text" and STOP in reply.text and case["constraint"] == "none":
            yield f"{how}: the stop text is in {reply.text[-40:]!r}"

    def _check_complete(self, case: Case, reply: Reply, how: str) -> Iterator[str]:
        """Check an answer that did not end for its length."""
        forced = case["constraint"] in ("required", "named", "strict")
        ended_by_stop = case["stop"] == "text"
        if forced and not reply.calls and not ended_by_stop:
            yield f"{how}: no call, but {reply.text[:60]!r} ({reply.reason})"
        for name, arguments in reply.calls:
            if name != TOOL:
                yield f"{how}: the tool {name!r} does not exist"
            elif forced and not is_valid(arguments):
                yield f"{how}: {arguments!r} does not follow the schema"
        if case["constraint"] == "schema" and not ended_by_stop:
            begun = "def " if case["prefill"] == "begun" else ""
            if not begun and not is_valid(reply.text):
                yield f"{how}: {reply.text[:80]!r} does not follow the schema"

    def _sent(self, case: Case, body: Body) -> Body:
        """The body for the case's API, which may need the prompt that the template renders."""
        if case["api"] not in RAW:
            return body
        rendered = self._checked(self._http.post("/apply-template", json=body))["prompt"]
        return raw_body(case, body, rendered, self._marker)

    def _whole(self, case: Case, body: Body) -> Reply:
        answer = self._http.post(PATHS[case["api"]], json=self._sent(case, body))
        found = self._checked(answer)
        return reply_of(case["api"], found)

    def _streamed(self, case: Case, body: Body) -> Reply:
        more: Body = {"stream": True}
        if case["api"] in ("chat", "completions"):
            more["stream_options"] = {"include_usage": True}
        answer = self._http.post(PATHS[case["api"]], json=self._sent(case, body) | more)
        if answer.status_code != 200:
            self._checked(answer)
        return streamed_reply(case["api"], [*events_of(answer.text)])

    def _checked(self, answer: httpx.Response) -> Body:
        found: Body = answer.json()
        if answer.status_code == 400:
            raise Refused(sentence_of(found))
        assert answer.status_code == 200, f"status {answer.status_code}: {answer.text[:300]}"
        return found


def _answer_of(case: Case, reply: Reply) -> list[Any]:
    """The messages of an answer, for the next turn."""
    if case["api"] in RAW:
        return [{"role": "assistant", "content": reply.text}]
    return list(reply.raw)


def sentence_of(body: Body) -> str:
    """The sentence of an error's body. Raises AssertionError if it is not one sentence."""
    words = str(body["error"]["message"])
    assert words.strip() == words, f"blanks around {words!r}"
    assert "\n" not in words, f"several lines: {words!r}"
    assert not re.search(r"Traceback|Error\b.*\(", words), words
    return words


def events_of(text: str) -> Iterator[tuple[str, Body]]:
    """Events of a stream: (name, data). Raises AssertionError for an error in it."""
    for block in text.split("\n\n"):
        name, data = "", list[str]()
        for line in block.splitlines():
            if line.startswith("event:"):
                name = line[6:].strip()
            elif line.startswith("data:"):
                data.append(line[5:].strip())
        if data and data != ["[DONE]"]:
            found = json.loads("\n".join(data))
            assert "error" not in found or not found["error"], f"an error in a stream: {found}"
            yield name, found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_valid(text: str) -> bool:
    """True if the text is an object of asking.SCHEMA."""
    if not _is_json(text):
        return False
    found = json.loads(text)
    return (
        isinstance(found, dict)
        and found.get("colour") in WORDS
        and found.keys() <= {"colour", "n"}
        and isinstance(found.get("n", 0), int)
    )
