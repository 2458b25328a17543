"""Asks any server with OpenAI's chat completions for greedy answers, token by token."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from specoffload.bench.texts import Answer, Message, Token
from specoffload.errors import UsageError

_PATIENCE_S = 3600
_REFUSED = (400, 422)


class OpenAIServer:
    """A server at `url`, e.g. http://127.0.0.1:8080, with or without the path /v1."""

    def __init__(self, url: str, n_predict: int) -> None:
        """Answers have at most `n_predict` tokens. Raises UsageError for other addresses."""
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--texts {url}: must begin with http:// or https://")
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._n_predict = n_predict
        # llama.cpp's servers reuse prompts unless they are told not to. Others may refuse the key.
        self._more: dict[str, Any] = {"cache_prompt": False}

    def model(self) -> str:
        """Return the id of the server's first model. Raises UsageError."""
        found = self._read("/models", None).get("data") or [{}]
        return str(found[0].get("id", ""))

    def ask(self, model: str, messages: Sequence[Message]) -> Answer:
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
        choice = (self._read("/chat/completions", body).get("choices") or [{}])[0]
        tokens = (choice.get("logprobs") or {}).get("content") or []
        if not tokens:
            text = (choice.get("message") or {}).get("content") or ""
            return tuple(Token(character) for character in text)
        return tuple(Token(str(token.get("token", "")), _margin(token)) for token in tokens)

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
            said = e.read(300).decode(errors="replace")
            raise UsageError(f"--texts {self._url}: it answered {e.code}: {said}") from e
        except (OSError, ValueError) as e:
            raise UsageError(f"--texts {self._url}: no answer of an OpenAI server ({e})") from e

    def _fetch(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            found = json.load(answer)
        if not isinstance(found, dict):
            raise ValueError(f"{str(found):.80} is not a JSON object")
        return found


def _margin(token: dict[str, Any]) -> float | None:
    """The token's lead in log-probability over the likeliest other token."""
    others = [
        float(other["logprob"])
        for other in token.get("top_logprobs") or ()
        if other.get("token") != token.get("token")
    ]
    return float(token["logprob"]) - max(others) if others and "logprob" in token else None
