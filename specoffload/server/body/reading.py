"""From a request's body to a checked request: bounded before it is parsed."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import Request

from specoffload.server.body.names import (
    HEADER,
    header_value,
    ignored_names,
    refuse_ignored,
    renamed,
)
from specoffload.server.engine.client import RequestFailed, unavailable
from specoffload.server.engine.messages import Problem
from specoffload.session.generation import ModelCard

_OVERHEAD_BYTES = 2**20  # tools, schemas, and the JSON around a prompt
_MOST_BYTES = 64 * 2**20
_MOST_BYTES_AT_ONCE = 2 * _MOST_BYTES  # of all bodies that are being read
_RETRY_AFTER_S = 2

_Body = TypeVar("_Body", bound=BaseModel)


def body_limit_bytes(card: ModelCard) -> int:
    """The longest body that may hold a prompt which fits: text may double when JSON escapes it."""
    longest_prompt_bytes = card.n_ctx * card.longest_token_bytes
    return min(_OVERHEAD_BYTES + 2 * longest_prompt_bytes, _MOST_BYTES)


def has_body(headers: Headers) -> bool:
    """True for a request that announces a body: of a known length, or in chunks (RFC 9112)."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


class BodyReader:
    """Reads the bodies of one server."""

    def __init__(self, *, strict: bool = False) -> None:
        """`strict`: a parameter without effect is refused."""
        self._strict = strict
        self._n_bytes = 0  # of bodies being read

    async def read(
        self,
        request: Request,
        kind: type[_Body],
        limit_bytes: int,
    ) -> _Body:
        """The body as `kind`; what it ignores is noted for the answer's header.

        Raises RequestFailed: 413 over the limit, 503 where too much is being read, 400 for
        anything that does not fit; BadRequest for a parameter that cannot be.
        """
        body = await self.read_unjudged(request, kind, limit_bytes)
        self.judge(request, body)
        return body

    async def read_unjudged(self, request: Request, kind: type[_Body], limit_bytes: int) -> _Body:
        """As `read`, but for names that no field has: they are the caller's to judge."""
        return checked(parse(await self._bytes(request, limit_bytes)), kind)

    def judge(self, request: Request, body: BaseModel) -> None:
        """Note what of `body` has no effect. Raises BadRequest for what cannot be."""
        names = ignored_names(body)
        if self._strict:
            refuse_ignored(type(body), names)
        ignore(request, names)

    async def _bytes(self, request: Request, limit_bytes: int) -> bytes:
        chunks: list[bytes] = []
        n_bytes = 0
        try:
            async for chunk in request.stream():
                n_bytes += len(chunk)
                self._n_bytes += len(chunk)
                if n_bytes > limit_bytes:
                    message = (
                        f"the body is over {limit_bytes} bytes, which is more than a prompt that "
                        "fits the context can take: shorten it or raise --ctx-size"
                    )
                    raise RequestFailed(_invalid(message, 413))
                if self._n_bytes > _MOST_BYTES_AT_ONCE:
                    message = f"bodies of over {_MOST_BYTES_AT_ONCE} bytes are being read"
                    raise RequestFailed(unavailable(message, _RETRY_AFTER_S))
                chunks.append(chunk)
        finally:
            self._n_bytes -= n_bytes
        return b"".join(chunks)


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises RequestFailed (400)."""
    try:
        found = from_json(data, allow_inf_nan=False)
    except ValueError as e:
        raise RequestFailed(_invalid(f"the body is not JSON: {e}")) from e
    if not isinstance(found, dict):
        raise RequestFailed(_invalid("the body must be a JSON object"))
    return found


def checked(found: dict[str, Any], kind: type[_Body]) -> _Body:
    """A JSON object as `kind`. Raises RequestFailed (400)."""
    try:
        return kind.model_validate(renamed(found, kind.model_fields))
    except ValidationError as e:
        raise RequestFailed(_invalid(_sentence(e))) from e


def ignore(request: Request, names: tuple[str, ...]) -> None:
    """Note parameters for `IgnoredHeader`."""
    noted: list[str] = request.scope.setdefault("state", {}).setdefault("ignored", [])
    noted += names


def ignored_header(scope: Any) -> list[tuple[bytes, bytes]]:
    """The header that names what was ignored; none where nothing was."""
    names = scope.get("state", {}).get("ignored", ())
    return [(HEADER, header_value(names))] if names else []


def _sentence(error: ValidationError) -> str:
    """The first complaint, by the place in the body that it is about."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the body"
    return f"{where}: {first['msg']}"


def _invalid(message: str, http_status: int = 400) -> Problem:
    return Problem("BadRequest", message, http_status, "invalid_request_error", exit_code=2)
