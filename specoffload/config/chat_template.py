"""From flags to the settings of a chat: the template read, its variables, the reasoning."""

from __future__ import annotations

from pathlib import Path

from specoffload.chat.built_in import BUILT_IN
from specoffload.chat.conversation import ChatSettings, ReasoningOptions
from specoffload.config.options import ChatOptions
from specoffload.errors import UsageError


def chat_settings(own: ChatOptions) -> ChatSettings:
    """Raises UsageError for a template that is neither built in nor a file."""
    return ChatSettings(
        read_template(own.template),
        _name_of(own.template),
        own.template_kwargs or {},
        ReasoningOptions(own.reasoning_format, own.reasons, own.reasoning_effort),
        own.prefill,
    )


def _name_of(template: str | None) -> str:
    """For messages."""
    if template is None:
        return "of the model file"
    return "of --chat-template" if "{" in template else template


def read_template(named: str | None) -> str | None:
    """A built-in template, one that is typed, or a file's text. Raises UsageError for none."""
    if named is None or "{{" in named or "{%" in named:
        return named
    if named in BUILT_IN:
        return BUILT_IN[named]
    try:
        return Path(named).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(
            f"--chat-template {named}: is no file ({e.strerror if isinstance(e, OSError) else e}), "
            f"no Jinja, and none of llama.cpp's templates: {', '.join(BUILT_IN)}"
        ) from e
