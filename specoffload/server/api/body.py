"""Reads and checks a request's body, and renames its parameters to the names used here.

Programs that work with several servers send parameters that only some of them have. Like those
servers, this one ignores parameters without effect. It names them in the answer's header
`X-Ignored-Parameters`. Parameters that would change the kind of the answer are always refused.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import Request

from offload.errors import BadRequest
from specoffload.server.api.half_pairs import without_half_pairs
from specoffload.server.api.media_bytes import MediaBytes
from specoffload.server.engine.messages import Event, Problem, RequestFailed, unavailable

HEADER = b"x-ignored-parameters"
_STATE = "ignored"  # key of the ignored parameters' names in a request's scope

# Names of llama-server, vLLM, text-generation-webui and KoboldCpp -> the names used here.
ALIASES: Mapping[str, str] = {
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "reasoning_budget": "thinking_budget_tokens",
    "reasoning_budget_tokens": "thinking_budget_tokens",
    "thinking_budget": "thinking_budget_tokens",
    "thinking_token_budget": "thinking_budget_tokens",
    "rep_pen": "repeat_penalty",
    "repetition_penalty": "repeat_penalty",
    "repetition_penalty_range": "repeat_last_n",
    "rep_pen_range": "repeat_last_n",
    "speculative.n_max": "draft_max",
    "speculative.n_min": "draft_min",
    "speculative.p_min": "draft_p_min",
    "stopping_strings": "stop",
    "stop_sequence": "stop",
    "typ_p": "typical_p",
    "typical": "typical_p",
}

# Bookkeeping of OpenAI's platform, and hints about speed. They do not change the answer.
INERT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Parameters that would change the kind of the answer, with the harmless values besides null.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1, 0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}

# What to do instead with those that the chats of this server read, under this name or another.
_ASK_CHAT = "leave it out, or send a conversation with it to /v1/chat/completions"
REMEDIES: Mapping[str, str] = {
    "function_call": "send tool_choice to /v1/chat/completions in its place",
    "functions": "send them as tools to /v1/chat/completions",
    "logprobs": _ASK_CHAT,
    "n": _ASK_CHAT,
    "tool_choice": _ASK_CHAT,
    "tools": _ASK_CHAT,
    "top_logprobs": _ASK_CHAT,
}

_OFF: tuple[object, ...] = (False, 0, 0.0, -1, "", [], {})  # values that turn a parameter off
_ON_BY_DEFAULT = ("think", "reason")  # many models think unless a parameter turns it off

_FIELD = re.compile("(?!(?:str|int|float|bool)$)[a-z_][a-z0-9_.]*")
_Body = TypeVar("_Body", bound=BaseModel)


MOST_BYTES = 64 * 2**20  # of a body
MOST_BYTES_AT_ONCE = 2 * MOST_BYTES  # all bodies that are held may have as many together
SMALL_BODY_BYTES = 256 * 2**10  # a body of this size finds room also where large ones take it all
BYTES_FOR_SMALL_BODIES = 32 * 2**20  # what small bodies may have in addition
_RETRY_AFTER_S = 2


class HeldBodies:
    """Reads bodies, and counts the bytes of all that are held, also while they arrive.

    A body is in memory until its request is answered: as text in its job, and as a message to the
    engine. So whoever answers holds it that long.
    """

    def __init__(self) -> None:
        self.n_bytes = 0

    @asynccontextmanager
    async def read(
        self,
        chunks: AsyncIterable[bytes],
        limit_bytes: int = MOST_BYTES,
        n_ctx: int | None = None,
    ) -> AsyncIterator[bytearray]:
        """Read a body, and count it as held until the block ends.

        Raises RequestFailed: 413 if it is over `limit_bytes` without its media, or over MOST_BYTES
        with them, and 503 if all held bodies together are too large. `n_ctx` is the size of the
        context if that is the reason for the limit.
        """
        data, media = bytearray(), MediaBytes()
        try:
            async for chunk in chunks:
                data += chunk
                self.n_bytes += len(chunk)
                if limit_bytes < MOST_BYTES:
                    media.add(chunk)
                if len(data) - media.n_bytes > limit_bytes:
                    raise too_large(limit_bytes, n_ctx)
                if len(data) > MOST_BYTES:
                    raise too_large(MOST_BYTES, None)
                extra_bytes = BYTES_FOR_SMALL_BODIES if len(data) <= SMALL_BODY_BYTES else 0
                if self.n_bytes > MOST_BYTES_AT_ONCE + extra_bytes:
                    words = (
                        f"requests whose bodies have over {MOST_BYTES_AT_ONCE} bytes together are "
                        "not answered yet: try again later"
                    )
                    raise RequestFailed(unavailable(words, _RETRY_AFTER_S, Event.QUEUE_FULL))
            yield data
        finally:
            self.n_bytes -= len(data)

    @contextmanager
    def hold(self, n_bytes: int) -> Iterator[None]:
        """Count a body that was read before as held until the block ends."""
        self.n_bytes += n_bytes
        try:
            yield
        finally:
            self.n_bytes -= n_bytes


def read_json(data: bytearray) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises RequestFailed (400) for anything else."""
    text = data.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    try:
        try:
            body = from_json(text, allow_inf_nan=False)
        except ValueError:
            whole = without_half_pairs(text)
            if whole is None:
                raise
            body = from_json(whole, allow_inf_nan=False)
    except ValueError as e:
        raise invalid(f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    return body


def checked(body: dict[str, Any], kind: type[_Body]) -> _Body:
    """Return `body` as `kind`. Raises RequestFailed (400) with the first fault and its place."""
    try:
        return kind.model_validate(body)
    except ValidationError as e:
        errors = e.errors(include_url=False, include_context=False, include_input=False)
        raise fault(errors, body) from e


def fault(errors: Sequence[Any], sent: object = None) -> RequestFailed:
    """Return the 400 for the innermost of pydantic's `errors`. A union has one error per type.

    The names of types are left out of the place that is shown. A field has its name in `sent`, the
    request's body.
    """
    error = max(errors, key=lambda error: len(error["loc"]))
    places = [str(part) for part in error["loc"] if isinstance(part, int) or _FIELD.fullmatch(part)]
    if places and isinstance(sent, dict) and sent.get(places[0]) is None:
        others = [
            other
            for other, name in ALIASES.items()
            if name == places[0] and sent.get(other) is not None
        ]
        places[:1] = others[:1] or places[:1]
    where = ".".join(places) or "the body"
    return invalid(f"{where}: {error['msg']}")


def invalid(message: str, http_status: int = 400, event: Event | None = None) -> RequestFailed:
    kind = "invalid_request_error"
    problem = Problem("BadRequest", message, http_status, kind, exit_code=2, event=event)
    return RequestFailed(problem)


def too_large(limit_bytes: int, n_ctx: int | None = None) -> RequestFailed:
    """Return the 413. `n_ctx` is the size of the context if that is the reason for the limit."""
    said = f"the body is over {limit_bytes} bytes"
    if n_ctx is None:
        return invalid(f"{said}: shorten it", 413, Event.BODY_TOO_LARGE)
    remedy = (
        f", which is more than a prompt that fits {n_ctx} tokens can take: shorten it or raise "
        "--ctx-size"
    )
    return invalid(said + remedy, 413, Event.BODY_OVER_CONTEXT)


def has_body(headers: Headers) -> bool:
    """True if the request announces a body, of a known length or in chunks (RFC 9112)."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def renamed(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return `body` under the names used here. A value under our name takes precedence."""
    result = dict(body)
    for other, name in ALIASES.items():
        if other in known or name not in known or other not in body:
            continue
        if result.get(name) is None:
            result[name] = result.pop(other)
        elif result[other] == result[name]:
            del result[other]
    return result


def _is_one_of(value: object, offs: tuple[object, ...]) -> bool:
    return any(type(value) is type(off) and value == off for off in offs)


def ignored_names(request: BaseModel) -> tuple[str, ...]:
    """Return the names of parameters that are set and have no effect.

    Raises BadRequest for a parameter that would change the kind of the answer.
    """
    names = []
    for name, value in (request.model_extra or {}).items():
        if value is None or name in INERT:
            continue
        if name in REFUSED:
            if not _is_one_of(value, REFUSED[name]):
                raise BadRequest(_refusal(name))
        elif not _is_one_of(value, _OFF) or any(word in name for word in _ON_BY_DEFAULT):
            names.append(name)
    return tuple(names)


def _refusal(name: str) -> str:
    if name in REMEDIES:
        return f"{name} is not supported by this API: {REMEDIES[name]}"
    return f"{name} is not supported by this server: leave it out"


def ignore(request: Request, names: Collection[str]) -> None:
    """Record parameters without effect, for `ignored_header`."""
    noted: list[str] = request.scope.setdefault("state", {}).setdefault(_STATE, [])
    noted += names


def ignored_header(scope: Any) -> list[tuple[bytes, bytes]]:
    """Return the header that names the recorded parameters; empty if there are none."""
    names = scope.get("state", {}).get(_STATE, ())
    return [(HEADER, header_value(names))] if names else []


def header_value(names: Collection[str]) -> bytes:
    """Return the `names` that fit a header, in printable ASCII, and the number of the others."""
    # h11 rejects header values with leading or trailing blanks, so padded names are not shown.
    shown = [n for n in names if n.isascii() and n.isprintable() and n and n.strip() == n][:50]
    shown = [name for name in shown if len(name) < 100]
    n_more = len(names) - len(shown)
    return ", ".join([*shown, *([f"{n_more} more"] if n_more else [])]).encode()
