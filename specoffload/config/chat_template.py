"""From flags to the settings of a chat: the template read, its variables, the reasoning."""

from __future__ import annotations

from pathlib import Path

from specoffload.chat.conversation import ReasoningOptions
from specoffload.chat.format import BUILT_IN
from specoffload.chat.settings import ChatSettings
from specoffload.config.options import ChatOptions
from specoffload.errors import UsageError


def chat_settings(own: ChatOptions) -> ChatSettings:
    """Raises UsageError for a template that is neither built in nor a file."""
    return ChatSettings(
        read_template(own.template),
        own.template or "of the model file",
        own.template_kwargs or {},
        ReasoningOptions(own.reasoning_format, own.reasons, own.reasoning_effort),
        own.prefill,
    )


def read_template(named: str | None) -> str | None:
    """A built-in template, or a file's text. Raises UsageError for neither."""
    if named is None or named in BUILT_IN:
        return BUILT_IN[named] if named else None
    try:
        return Path(named).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        known = ", ".join(BUILT_IN)
        raise UsageError(f"--chat-template {named}: is none of {known}, and no file ({e})") from e
