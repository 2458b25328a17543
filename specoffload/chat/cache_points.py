"""Finds where in a prompt the parts end that a client marks with `cache_control`. Pure.

A template may trim, move or repeat what it is given. So a point is found by rendering the
conversation again with other text after it: the point is where the two prompts begin to differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specoffload.chat.conversation import CachePoint, Conversation, Tool

# A request may mark this many places, as in Anthropic's API. The prompt is rendered once more for
# each of them.
MOST_POINTS = 4
_OTHER = "\ue000other text"  # begins with a letter for private use, which texts do not have


def cache_ends(
    conversation: Conversation, text: str, render: Callable[[Conversation], str]
) -> tuple[int, ...]:
    """Return the numbers of characters of `text` before each point, ascending and without 0.

    `text` is the prompt of `conversation`, and `render` returns that of another one. Raises what
    `render` raises.
    """
    ends = {
        n_common(text, render(_changed_after(conversation, point)))
        for point in conversation.cache_points
    }
    return tuple(sorted(ends - {0}))


def _changed_after(conversation: Conversation, point: CachePoint) -> Conversation:
    """Return the conversation with another text after the point."""
    at = point.index
    if point.of == "tool":
        tools, name = conversation.tools, "other"
        while any(tool.name == name for tool in tools):
            name += "_"
        more = Tool(name, _OTHER)
        return replace(conversation, tools=(*tools[: at + 1], more, *tools[at + 1 :]))
    messages = conversation.messages
    if point.n_chars is None:
        other_message = {"role": "user", "content": _OTHER}
        changed = (*messages[: at + 1], other_message, *messages[at + 1 :])
    else:
        content = messages[at]["content"][: point.n_chars] + _OTHER
        changed = (*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :])
    return replace(conversation, messages=changed)


def n_common(a: str, b: str) -> int:
    """Return the number of characters with which both texts begin."""
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        if a.startswith(b[:middle]):
            least = middle
        else:
            most = middle - 1
    return least
