"""Malformed requests from a seeded generator: number `i` of a seed is always the same bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from lab.attack.client import Request, ask_for
from lab.attack.grammars import HOSTILE_GRAMMARS, HOSTILE_SCHEMAS

_SAYS = [{"role": "user", "content": "Write a line."}]
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
_CHAT: dict[str, Any] = {"messages": _SAYS, "max_tokens": 2}
_TEXT: dict[str, Any] = {"prompt": "import os\n", "max_tokens": 2}

# Every endpoint that takes a body, each with a valid body.
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/chat/completions": {**_CHAT, "tools": [_TOOL]},
    "/v1/completions": _TEXT,
    "/completions": _TEXT,
    "/completion": _TEXT,
    "/infill": {"input_prefix": "def f(", "input_suffix": "):\n", "max_tokens": 2},
    "/v1/messages": {"messages": _SAYS, "max_tokens": 2, "model": "any"},
    "/v1/messages/count_tokens": {"messages": _SAYS, "model": "any"},
    "/v1/responses": {"input": "Write a line.", "max_output_tokens": 2},
    "/responses": {"input": _SAYS, "max_output_tokens": 2},
    "/tokenize": {"content": "import os"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": _SAYS},
    "/slots/0?action=erase": {},
    "/slots/1?action=save": {"filename": "x"},
    "/slots/7?action=restore": {"filename": "../x"},
}
_GENERATING = [path for path, body in ENDPOINTS.items() if any("max" in name for name in body)]

_FIELD_NAMES = """
temperature top_k top_p min_p seed stop stream n logprobs top_logprobs logit_bias grammar
json_schema response_format tools model tool_choice repeat_penalty repeat_last_n presence_penalty
frequency_penalty samplers mirostat dry_multiplier dry_sequence_breakers typical_p id_slot
cache_prompt time_limit_s draft_max speculative.n_max ignore_eos echo suffix best_of
stream_options chat_template_kwargs reasoning_effort system reasoning_format add_generation_prompt
continue_final_message thinking input instructions previous_response_id stop_sequences text
response_fields user min_keep xtc_probability top_n_sigma dynatemp_range adaptive_target metadata
timings_per_token return_tokens parallel_tool_calls max_tokens prompt max_completion_tokens
messages content tokens filename n_predict n_indent t_max_predict_ms __class__
"""
_FIELDS = (
    *_FIELD_NAMES.split(),
    "\0",
)

_SPECIAL = "<|im_start|><|endoftext|><s></s><|eot_id|><start_of_turn>[INST]"


def hostile_value(rng: Random) -> Any:
    """A random value: often of a wrong type, out of range or far too long."""
    n = rng.choice((0, 1, 7, 300, 5000))
    kind = rng.randrange(24)
    if kind < 8:
        return rng.choice(
            (None, True, False, -1, 0, 1, 1.5, -0.0, 1e308, -1e308, 5e-324, 2**31, 2**63, 2**64)
        )
    if kind < 12:
        return rng.choice(("", "\0", "x" * n, "é" * n, "😀" * n, "\\" * n, '"' * n, "a\u2028b"))
    if kind == 12:
        return _SPECIAL * n
    if kind == 13:
        return [rng.choice((0, -1, 1, 2**40, "x", None, [], {}, 1.5))] * n
    if kind == 14:
        return [f"{i}" for i in range(n)]
    if kind == 15:
        return {f"k{i}": i for i in range(n)}
    if kind == 16:
        return _nested(rng.choice((3, 60, 900)), rng.random() < 0.5)
    if kind == 17:
        return rng.choice(list(HOSTILE_GRAMMARS.values()))
    if kind == 18:
        return rng.choice(list(HOSTILE_SCHEMAS.values()))
    if kind == 19:
        return [[]] * n
    if kind == 20:
        return 10 ** rng.choice((5, 20, 400))
    if kind == 21:
        return {"type": rng.choice(("json_schema", "json_object", "function", "text", "x", 3))}
    if kind == 22:
        return "{{ 1/0 }}{% for i in range(10**9) %}{% endfor %}" * (1 + n // 100)
    return "".join(
        chr(rng.choice((rng.randrange(1, 128), rng.randrange(0x10000)))) for _ in range(n % 400)
    )


def _nested(depth: int, in_lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if in_lists else {"a": value}
    return value


def _messages(rng: Random) -> Any:
    roles = ("user", "assistant", "system", "tool", "developer", "king", "", None, 3)
    contents: tuple[Any, ...] = (
        "x",
        "",
        None,
        3,
        [],
        [{"type": "text", "text": "x"}],
        [{"type": "image_url"}],
        {},
        _SPECIAL,
    )
    many = rng.choice((1, 2, 5, 400))
    return [
        {
            "role": rng.choice(roles) if rng.random() < 0.5 else "user",
            "content": rng.choice(contents) if rng.random() < 0.7 else hostile_value(rng),
            **({"tool_calls": hostile_value(rng)} if rng.random() < 0.2 else {}),
        }
        for _ in range(many)
    ]


def _with_fields(rng: Random, body: dict[str, Any]) -> dict[str, Any]:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name = rng.choice([*body, *body, *_FIELDS] if body else list(_FIELDS))
        if rng.random() < 0.1:
            body.pop(name, None)
        else:
            body[name] = hostile_value(rng)
    if "messages" in body and rng.random() < 0.3:
        body["messages"] = _messages(rng)
    return body


def _constrained(rng: Random, body: dict[str, Any]) -> dict[str, Any]:
    """`body` with a hostile grammar or schema, sometimes damaged."""
    if rng.random() < 0.5:
        text = rng.choice(list(HOSTILE_GRAMMARS.values()))
        if rng.random() < 0.5:
            at = rng.randrange(len(text) + 1)
            text = (
                text[:at]
                + rng.choice(("", "{", "}", "*", '"', "\\", "(", "|", "\0"))
                + text[at + 1 :]
            )
        return {**body, "grammar": text}
    schema = rng.choice(list(HOSTILE_SCHEMAS.values()))
    if rng.random() < 0.3:
        schema = {"type": "object", "properties": {"a": schema, "b": hostile_value(rng)}}
    name = rng.choice(("json_schema", "response_format", "text"))
    if name == "json_schema":
        return {**body, "json_schema": schema}
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    if name == "text":
        return {**body, "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    return {**body, "response_format": wrapped}


def _long(rng: Random, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """`body` with more text, messages or stop sequences than any request may have."""
    text = rng.choice(("x", "é", " ", "\n", _SPECIAL, "<0x0A>", "a b ")) * rng.choice(
        (5000, 60_000)
    )
    for name in ("prompt", "content", "input", "input_prefix"):
        if name in body and isinstance(body[name], str):
            return {**body, name: text}
    if "messages" in body:
        many = rng.choice(([{"role": "user", "content": text}], _SAYS * 3000))
        return {**body, "messages": many}
    if path == "/detokenize":
        return {"tokens": [rng.randrange(4000)] * 50_000}
    return {**body, "stop": ["x" * 100] * 5000}


def hostile_body(rng: Random) -> tuple[str, bytes]:
    """A path, and a hostile body for it."""
    path = rng.choice(list(ENDPOINTS))
    body: dict[str, Any] = json.loads(json.dumps(ENDPOINTS[path]))
    kind = rng.random()
    if kind < 0.55:
        body = _with_fields(rng, body)
    elif kind < 0.75:
        path = rng.choice(_GENERATING)
        body = _constrained(rng, json.loads(json.dumps(ENDPOINTS[path])))
    elif kind < 0.8:
        body = _long(rng, path, body)
    return path, _bytes_of(rng, body, damage=kind >= 0.8)


def _bytes_of(rng: Random, body: dict[str, Any], *, damage: bool) -> bytes:
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if not damage:
        return data
    kind = rng.randrange(12)
    at = rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        return rng.choice((b"[", b'{"a":')) * rng.choice((100, 100_000))
    if kind == 3:
        digits = b"9" * rng.choice((30, 400, 5000, 500_000))
        return b'{"prompt": "x", "seed": ' + digits + b', "max_tokens": 1}'
    if kind == 4:
        return rng.choice(
            (b"", b"null", b"[]", b'""', b"0", b"NaN", b"\xef\xbb\xbf{}", b"\xff\xfe")
        )
    if kind == 5:
        return data[:-1] + b', "prompt": "\\ud800", "messages": "\\udfff"}'
    if kind == 6:
        return data[:-1] + b', "temperature": ' + rng.choice((b"NaN", b"Infinity", b"1e999")) + b"}"
    if kind == 7:
        return bytes(rng.randrange(256) for _ in range(rng.choice((1, 50, 3000))))
    if kind == 8:
        return b" " * rng.choice((10, 2_000_000)) + data
    if kind == 9:
        return b'{"prompt": [' + b"1," * rng.choice((10, 200_000)) + b"1]}"
    if kind == 10:
        return b"{" + b",".join(b'"k%d": 0' % i for i in range(rng.choice((5, 50_000)))) + b"}"
    return data + data


_OTHER_PATHS = """
/ /health /v1/models /v1/models/x /props /metrics /slots /openapi.json /page/main.js
/page/../../etc/passwd /page/%2e%2e/%2e%2e/etc/passwd /slots/-1 // /v1/nothing /docs
/slots/99999999999999999999?action=save /v1/models/%00 /slots?fail_on_no_slot=1 /v1/embeddings
/health/ /%ff%fe
"""
_PATHS = (
    *ENDPOINTS,
    *_OTHER_PATHS.split(),
    "/" + "x" * 5000,
)
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")


@dataclass(frozen=True)
class Attack:
    """One request as bytes.

    `may_hang_up`: the request is not valid HTTP, so the server may close without an answer.
    `ends`: the client closes its sending side afterwards, so the server need not wait for more.
    `leaves`: the client does not wait for the whole answer.
    """

    data: bytes
    may_hang_up: bool = False
    ends: bool = False
    leaves: bool = False


def attack(seed: int, number: int, port: int) -> Attack:
    """Request `number` of the seed."""
    rng = Random(f"{seed}/{number}")
    kind = rng.random()
    if kind < 0.80:
        return Attack(Request(*hostile_body(rng)).raw(port))
    if kind < 0.88:
        return Attack(_headers(rng).raw(port))
    if kind < 0.92:
        method = rng.choice(_METHODS)
        return Attack(Request(rng.choice(_PATHS), b"", method).raw(port))
    if kind < 0.96:
        return _framing(rng, port)
    body = {"prompt": "import os\n", "max_tokens": 40, "stream": rng.random() < 0.5}
    return Attack(ask_for("/v1/completions", body).raw(port), leaves=True)


def _headers(rng: Random) -> Request:
    path, body = hostile_body(rng) if rng.random() < 0.3 else ("/v1/completions", b'{"prompt": ""}')
    name, value = rng.choice(
        (
            ("Host", "evil.example"),
            ("Host", ""),
            ("Host", "127.0.0.1:1@evil.example"),
            ("Origin", "http://evil.example"),
            ("Origin", "null"),
            ("Content-Type", "text/plain"),
            ("Content-Type", ""),
            ("Content-Type", "application/json; charset=utf-7"),
            ("Authorization", "Bearer " + "x" * 8000),
            ("X-Api-Key", "\x80\xff"),
            ("X-Forwarded-For", "1.2.3.4, " * 500),
            ("X-Forwarded-For", "nonsense"),
            ("X-Forwarded-Proto", "gopher"),
            ("Accept-Encoding", "gzip;q=nan"),
            ("Expect", "100-continue"),
            ("Cookie", "a=b; " * 1000),
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade, close"),
            ("X-Long", "x" * 60_000),
            ("Range", "bytes=0-"),
        )
    )
    return Request(path, body, headers={name: value})


def _framing(rng: Random, port: int) -> Attack:
    """Requests whose lines or lengths are wrong."""
    host = f"Host: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    start = f"POST /v1/completions HTTP/1.1\r\n{host}"
    body = '{"prompt": "x", "max_tokens": 1}'
    texts = (
        f"{start}Content-Length: {len(body) + 50}\r\n\r\n{body}",
        f"{start}Content-Length: 5\r\n\r\n{body}",
        f"{start}Content-Length: -1\r\n\r\n{body}",
        f"{start}Content-Length: 9999999999999999999999\r\n\r\n{body}",
        f"{start}Content-Length: 3\r\nContent-Length: 4\r\n\r\n{body}",
        f"{start}Transfer-Encoding: chunked\r\n\r\nzz\r\n{body}\r\n0\r\n\r\n",
        f"{start}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n",
        f"{start}Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        f"{start}Transfer-Encoding: gzip\r\n\r\n{body}",
        f"GET /health HTTP/1.1\r\n{host}" + "X: y\r\n" * 5000 + "\r\n",
        f"GET /health HTTP/1.1\r\n{host}\0: y\r\n\r\n",
        f"GET /he alth HTTP/1.1\r\n{host}\r\n",
        f"GET /health HTTP/9.9\r\n{host}\r\n",
        f"GET /health HTTP/1.0\r\n{host}\r\n",
        f"GET /health\r\n{host}\r\n",
        "\r\n" * 500,
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "GET /" + "a" * 100_000,
        f"POST /tokenize HTTP/1.1\r\n{host}",
        "",
    )
    return Attack(rng.choice(texts).encode("latin-1"), may_hang_up=True, ends=True)
