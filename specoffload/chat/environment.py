"""Jinja as chat templates of model files expect it, which is as transformers has it.

https://huggingface.co/docs/transformers/chat_templating_writing names what a template may use: loop
controls, `{% generation %}`, `tojson` without HTML escaping, `raise_exception`, `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from offload.errors import BadRequest

MOST_TEMPLATE_CHARS = 1 << 20  # the longest published template is under 20,000


class _Refusal(Exception):
    """A template's own `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what a trainer learns from; its body is rendered as it is."""

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
    """The results of filters such as `map`: transformers cannot write them, llama.cpp can."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _refuse(message: object = "") -> NoReturn:
    raise _Refusal(str(message))


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    # Not transformers' immutable one: published templates append to lists of their own.
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def check(name: str, source: str) -> None:
    """Raises BadRequest where `source` is no Jinja template."""
    if len(source) > MOST_TEMPLATE_CHARS:
        raise BadRequest(
            f"chat template {name} has {len(source)} characters; at most {MOST_TEMPLATE_CHARS} "
            "are read"
        )
    try:
        _compiled(source)
    except jinja2.TemplateError as e:
        raise BadRequest(f"chat template {name} is no Jinja template: {e}") from e
    except RecursionError as e:
        raise BadRequest(f"chat template {name} is nested too deeply") from e


def render(
    name: str,
    source: str,
    variables: Mapping[str, Any],
    now: Callable[[], datetime] = datetime.now,
) -> str:
    """The text that the template `name` makes of `variables`.

    Raises BadRequest, whatever a template of anybody's does. Time and memory are not bounded here.
    """
    check(name, source)
    try:
        return _compiled(source).render(
            **{**variables, "strftime_now": lambda form: now().strftime(form)}
        )
    except _Refusal as e:
        raise BadRequest(f"chat template {name} refuses the messages: {e}") from e
    except RecursionError as e:
        raise BadRequest(f"chat template {name} calls itself without an end") from e
    except Exception as e:  # 1/0, a missing attribute, a method that the sandbox forbids
        kind = "" if isinstance(e, jinja2.TemplateError) else f"{type(e).__name__}: "
        raise BadRequest(f"chat template {name} failed on these messages: {kind}{e}") from e
