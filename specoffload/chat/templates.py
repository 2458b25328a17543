"""Renders chat templates with Jinja, configured as in transformers.

Templates have loop controls, `{% generation %}`, `tojson` without HTML escaping, `raise_exception`
and `strftime_now` (https://huggingface.co/docs/transformers/chat_templating_writing).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from offload.errors import BadRequest

MOST_TEMPLATE_CHARS = 1 << 20  # the longest published template is under 20,000


class _RaisedByTemplate(Exception):
    """A template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks text for training; its body is rendered without change."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[Any]:
    """Return the results of a filter such as `map` as a list.

    llama.cpp can write such results as JSON; transformers cannot.
    """
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _refuse(message: object = "") -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _environment() -> SandboxedEnvironment:
    # transformers uses an immutable sandbox, but published templates append to their lists.
    return SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )


@lru_cache(maxsize=128)
def _compiled(source: str) -> jinja2.Template:
    environment = _environment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


@lru_cache(maxsize=128)
def variables_of(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


def check(name: str, source: str) -> None:
    """Raise BadRequest if `source` is not a Jinja template."""
    if len(source) > MOST_TEMPLATE_CHARS:
        raise BadRequest(
            f"chat template {name} has {len(source)} characters; at most {MOST_TEMPLATE_CHARS} "
            "are read"
        )
    try:
        _compiled(source)
    except jinja2.TemplateError as e:
        raise BadRequest(f"chat template {name} is not a Jinja template: {e}") from e
    except RecursionError as e:
        raise BadRequest(f"chat template {name} is nested too deeply") from e


def render(
    name: str,
    source: str,
    variables: Mapping[str, Any],
    now: Callable[[], datetime] = datetime.now,
) -> str:
    """Return the text that the template `source` makes from `variables`; `name` is for errors.

    Raises BadRequest for any fault of a template. Time and memory are not limited.
    """
    check(name, source)
    try:
        return _compiled(source).render(
            **{**variables, "strftime_now": lambda form: now().strftime(form)}
        )
    except _RaisedByTemplate as e:
        raise BadRequest(f"chat template {name} refuses the messages: {e}") from e
    except RecursionError as e:
        raise BadRequest(f"chat template {name} calls itself without an end") from e
    except Exception as e:  # for example 1/0, a missing attribute, a forbidden method
        kind = "" if isinstance(e, jinja2.TemplateError) else f"{type(e).__name__}: "
        raise BadRequest(f"chat template {name} failed on these messages: {kind}{e}") from e
