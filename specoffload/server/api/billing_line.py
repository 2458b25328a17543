"""Leaves the billing line of Claude Code out of prompts.

Claude Code puts a line for Anthropic's billing before its system prompt, such as
`x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=fa690;`. Its values
change with the session or the request. Nothing after a changed token can be found in a KV cache
(ollama #14918, llama.cpp #20623).
"""

from __future__ import annotations

import re

from specoffload.server.api.requests import ChatMessage, ConversationRequest

BILLING_LINE = "x-anthropic-billing-header"

# Each field has to end at a semicolon or a line's end, so that text after the fields is kept.
_LINE = re.compile(
    rf"\A{BILLING_LINE}:(?:[ \t]*[A-Za-z_]+=[^\s;=]*(?:;|(?=\r?\n)|\Z))+[ \t]*[\r\n]*"
)
_ROLES = ("system", "developer")


def billing_chars(role: str, content: str) -> int:
    """Return how many characters the billing line takes at the beginning of a message's text."""
    match = _LINE.match(content) if role in _ROLES else None
    return match.end() if match else 0


def has_billing_line(request: ConversationRequest) -> bool:
    return any(billing_chars(message.role, _start(message)) for message in request.messages)


def _start(message: ChatMessage) -> str:
    """Return the first text of a message."""
    if isinstance(message.content, list):
        return (message.content[0].text or "") if message.content else ""
    return message.content or ""
