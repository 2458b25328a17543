"""Chat messages to a prompt, by the Jinja template that the model file carries."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from offload.errors import BadRequest


def render(template: str | None, messages: Sequence[dict[str, str]], *, bos: str, eos: str) -> str:
    """The prompt that asks for the next assistant turn.

    Raises BadRequest when there is no template or the template refuses the messages.
    """
    if not messages:
        raise BadRequest("messages is empty: at least one message is needed")
    if not template:
        raise BadRequest("this model carries no chat template; use /v1/completions")

    def refuse(message: str) -> NoReturn:
        raise BadRequest(f"the chat template refuses the messages: {message}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        return environment.from_string(template).render(
            messages=list(messages),
            bos_token=bos,
            eos_token=eos,
            add_generation_prompt=True,
            raise_exception=refuse,
            strftime_now=lambda form: datetime.now().strftime(form),
        )
    except jinja2.TemplateError as e:
        raise BadRequest(f"the chat template failed on these messages: {e}") from e
