"""Errors in the shape of Anthropic's API. Pure. https://docs.anthropic.com/en/api/errors"""

from __future__ import annotations

from typing import Any

from specoffload.server.engine.messages import Problem

PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}}`."""
    status = problem.http_status
    other = "api_error" if status >= 500 else "invalid_request_error"
    kind = _TYPES.get(status, other)
    return {"type": "error", "error": {"type": kind, "message": problem.message}}
