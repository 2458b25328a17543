"""Options of engines for experiments and tests, without the part of the options that has each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from offload.engine import EngineOptions
from offload.plan.wanted import Wanted
from offload.stream.options import StreamingOptions
from offload.times.context_memory import ContextOptions

Streaming = dict[str, Any]  # options of streaming by name, for `engine_options`


def engine_options(
    base: EngineOptions | None = None, *, streaming: Mapping[str, Any] | None = None, **named: Any
) -> EngineOptions:
    """Return `base` with other values of these options, in each part that has one of the name.

    `streaming` has more of them. Raises TypeError for a name that no part has.
    """
    base, named = base or EngineOptions(), {**(streaming or {}), **named}
    if "remote" in named:
        named.setdefault("order", named["remote"].order)
    of = {part: _of(part, named) for part in (ContextOptions, Wanted, StreamingOptions)}
    rest = {
        name: value for name, value in named.items() if not any(name in its for its in of.values())
    }
    context = replace(base.wanted.context, **of[ContextOptions])
    return replace(
        base,
        wanted=replace(base.wanted, context=context, **of[Wanted]),
        streaming=replace(base.streaming, **of[StreamingOptions]),
        **rest,
    )


def _of(part: type, named: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: named[field.name] for field in fields(part) if field.name in named}
