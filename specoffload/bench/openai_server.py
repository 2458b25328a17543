"""Asks any server with OpenAI's API for greedy answers: as tokens, with calls or as a response."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from specoffload.bench.agent import AgentReply, WrittenCall
from specoffload.bench.texts import AnswerTokens, RoleText, Token
from specoffload.errors import UsageError

_PATIENCE_S = 3600
_REFUSED = (400, 422)


class OpenAIServer:
    """A server at `url`, e.g. http://127.0.0.1:8080, with or without the path /v1."""

    def __init__(self, url: str, n_predict: int, flag: str) -> None:
        """Answers have at most `n_predict` tokens. `flag` is what errors say gave the address.

        Raises UsageError for other addresses.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{flag} {url}: must begin with http:// or https://")
        self._flag = flag
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._n_predict = n_predict
        # llama.cpp's servers reuse prompts unless they are told not to. Others may refuse the key.
        self._more: dict[str, Any] = {"cache_prompt": False}

    def model(self) -> str:
        """Return the id of the server's first model. Raises UsageError."""
        models = self._read("/models", None).get("data") or [{}]
        return str(models[0].get("id", ""))

    def ask(self, model: str, messages: Sequence[RoleText]) -> AnswerTokens:
        """Return the greedy answer: tokens with margins, or characters if it has no tokens.

        Raises UsageError.
        """
        body = {
            "model": model,
            "messages": [{"role": role, "content": text} for role, text in messages],
            "temperature": 0,
            "max_tokens": self._n_predict,
            "logprobs": True,
            "top_logprobs": 2,
        }
        choice = _choice(self._read("/chat/completions", body))
        tokens = (choice.get("logprobs") or {}).get("content") or []
        if not tokens:
            text = (choice.get("message") or {}).get("content") or ""
            return tuple(Token(character) for character in text)
        return tuple(Token(str(token.get("token", "")), _margin(token)) for token in tokens)

    def respond(self, model: str, question: str) -> str:
        """Return the text of the greedy response to `question`. Raises UsageError."""
        body = {
            "model": model,
            "input": question,
            "temperature": 0,
            "max_output_tokens": self._n_predict,
        }
        items = self._read("/responses", body).get("output") or []
        parts = [
            str(part.get("text") or "")
            for item in items
            for part in item.get("content") or ()
            if part.get("type") in ("output_text", "reasoning_text")
        ]
        return "".join(parts)

    def call_tools(
        self,
        model: str,
        tool_choice: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> AgentReply:
        """Return the greedy answer with its calls. Prompts are cached as the server usually does.

        Raises UsageError if there is no answer. A refusal is an answer.
        """
        body = {
            "model": model,
            "messages": list(messages),
            "tools": list(tools),
            "tool_choice": tool_choice,
            "temperature": 0,
            "max_tokens": self._n_predict,
        }
        try:
            answer = self._fetch("/chat/completions", body)
        except urllib.error.HTTPError as e:
            return AgentReply(refusal=_said(e))
        except (OSError, ValueError) as e:
            raise self._no_answer(e) from e
        message, timings = _choice(answer).get("message") or {}, answer.get("timings") or {}
        return AgentReply(
            str(message.get("content") or ""),
            tuple(_call(call) for call in message.get("tool_calls") or ()),
            int(timings.get("draft_n") or 0),
            int(timings.get("draft_n_accepted") or 0),
        )

    def _read(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            try:
                return self._fetch(path, body and {**body, **self._more})
            except urllib.error.HTTPError as e:
                if body is None or not self._more or e.code not in _REFUSED:
                    raise
                self._more = {}
                return self._fetch(path, body)
        except urllib.error.HTTPError as e:
            raise UsageError(f"{self._flag} {self._url}: it answered {_said(e)}") from e
        except (OSError, ValueError) as e:
            raise self._no_answer(e) from e

    def _no_answer(self, error: Exception) -> UsageError:
        return UsageError(f"{self._flag} {self._url}: no answer of an OpenAI server ({error})")

    def _fetch(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            fields = json.load(answer)
        if not isinstance(fields, dict):
            raise ValueError(f"{str(fields):.80} is not a JSON object")
        return fields


def _said(error: urllib.error.HTTPError) -> str:
    """The status of a refusal and the beginning of its text."""
    return f"{error.code}: {error.read(300).decode(errors='replace')}"


def _choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = (answer.get("choices") or [{}])[0]
    return choice


def _call(call: Mapping[str, Any]) -> WrittenCall:
    function = call.get("function") or {}
    return WrittenCall(
        str(call.get("id", "")), str(function.get("name", "")), str(function.get("arguments", ""))
    )


def _margin(token: dict[str, Any]) -> float | None:
    """The token's lead in log-probability over the likeliest other token."""
    others = [
        float(other["logprob"])
        for other in token.get("top_logprobs") or ()
        if other.get("token") != token.get("token")
    ]
    return float(token["logprob"]) - max(others) if others and "logprob" in token else None
