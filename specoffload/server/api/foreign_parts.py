"""Reads parts of messages that no text model needs as they are: other servers' tools, documents.

An agent sends its whole conversation with every request. Clients that change the server in the
middle of a session send blocks of tools that ran elsewhere (claude-code #95406), and new versions
of clients send types that are not known yet. One such part must not end the session. Its text is
read if it has one. Otherwise the part is left out, and the answer's header names it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.json_schema import SkipJsonSchema

from specoffload.server.api.omitted import omitted_kind
from specoffload.server.api.request_model import RequestModel

_MOST_TYPE_CHARS = 40
_TITLES = ("title", "source", "context")
_THOUGHTS = ("thinking", "text", "reasoning", "content", "summary")
_THINKING_TYPES = ("thinking", "reasoning")


class SetAside(RequestModel):
    """A part or item with a `type`. The fields of a type that is not known are not checked."""

    known_types: ClassVar[frozenset[str]]

    type: Any
    foreign: SkipJsonSchema[dict[str, Any] | None] = None  # the part as it was sent

    @model_validator(mode="before")
    @classmethod
    def _set_aside(cls, sent: Any) -> Any:
        if not isinstance(sent, dict):
            return sent
        given = {name: value for name, value in sent.items() if name != "foreign"}
        kind = given.get("type")
        if not isinstance(kind, str) or kind in cls.known_types:
            return given
        kept = {name: given[name] for name in ("type", "cache_control") if name in given}
        return kept | {"foreign": given}

    @model_serializer(mode="wrap")
    def _as_sent(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the JSON from which the same is read again, as for a response that is kept."""
        sent: dict[str, Any] = fields(self) if self.foreign is None else self.foreign
        return sent


def readable_text(part: Mapping[str, Any]) -> str | None:
    """Return the text of a part that is no part of this server's APIs; None if it has none.

    Documents and search results begin with their title, as Anthropic's models get them.
    """
    kind = part.get("type")
    if kind == "document":
        text = _text_of_source(part.get("source"))
    elif kind in ("search_result", "compaction"):
        text = flat_text(part.get("content"))
    elif kind == "tool_reference":
        return flat_text(part.get("tool_name")) or None
    else:
        return part["text"] if isinstance(part.get("text"), str) else None
    if not text:
        return None
    titles = [part[name] for name in _TITLES if isinstance(part.get(name), str)]
    return "\n".join(filter(None, [*titles, text]))


def thoughts_of(part: Mapping[str, Any]) -> str | None:
    """Return the text of a part with reasoning. None for other parts, and for encrypted ones.

    Mistral's parts have a list of texts, and OpenRouter's have types such as reasoning.text.
    """
    if str(part.get("type")).partition(".")[0] not in _THINKING_TYPES:
        return None
    return next(filter(None, (flat_text(part.get(name)) for name in _THOUGHTS)), None)


def place_and_type(where: str, part_type: str) -> str:
    """Return the name of a part that is left out, for the header."""
    return f"{where} ({part_type[:_MOST_TYPE_CHARS]})"


def is_left_out(part: Mapping[str, Any]) -> bool:
    """True if a part may be left out. Images, sounds and files have rules of their own."""
    return readable_text(part) is None and omitted_kind(str(part.get("type"))) is None


def flat_text(value: object) -> str:
    """Return a text, or the texts of a list of parts; empty for anything else."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def _text_of_source(source: object) -> str:
    """Return the text of a document's source; empty if it has none, as a PDF."""
    if not isinstance(source, dict):
        return ""
    data, media = source.get("data"), source.get("media_type")
    if source.get("type") == "text" and isinstance(data, str):
        return data
    if source.get("type") == "content":
        return flat_text(source.get("content"))
    if isinstance(data, str) and isinstance(media, str) and media.startswith("text/"):
        try:
            return base64.b64decode(data, validate=True).decode()
        except (binascii.Error, ValueError):
            return ""
    return ""
