"""Renders the beginning of an answer that the model continues (*prefill*). Pure.

The answer is rendered as a finished turn with a mark at its end, and the prompt is cut there, as
transformers does for `continue_final_message`. So it has the header, the channel and the reasoning
block of the model's family. Some templates drop the reasoning or leave its block open. The turn is
then written after the header of an answer, with the family's markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from offload.errors import BadRequest
from specoffload.chat.cache_points import n_common
from specoffload.chat.conversation import ContinuedPart
from specoffload.chat.families import without_harmony
from specoffload.chat.turns import MessageFields

MessagePart = Literal["reasoning_content", "content"]
RenderMessages = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Renders messages. The bool says whether the beginning of an answer follows them."""

_MARK = "begun-answer-ends-here"


@dataclass(frozen=True)
class BegunAnswer:
    """The beginning of an answer. `part` is the part that is continued."""

    reasoning: str
    content: str
    part: MessagePart

    @property
    def is_reasoning(self) -> bool:
        return self.part == "reasoning_content"


def begun_answer(
    message: Mapping[str, Any], continued: ContinuedPart, markers: tuple[str, str] | None
) -> BegunAnswer | None:
    """Return the parts of the message that is continued; None if nothing is begun.

    `markers` are the texts around the family's reasoning. If the content has them, its reasoning is
    taken out, so that the prompt has one block of reasoning (llama.cpp #21889). Raises BadRequest
    if the family has no reasoning to continue.
    """
    reasoning, content = message.get("reasoning_content") or "", message.get("content") or ""
    is_closed = False
    if markers is not None and not reasoning:
        reasoning, content, is_closed = _unpacked(content, *markers)
    if continued == "auto":
        if not (reasoning or content or is_closed):
            return None
        is_open = bool(reasoning) and not content and not is_closed and markers is not None
        part: MessagePart = "reasoning_content" if is_open else "content"
    else:
        part = continued
    if part == "reasoning_content" and markers is None:
        raise BadRequest(
            "reasoning_content cannot be continued: the chat template has no reasoning; begin the "
            "answer in content"
        )
    if part == "reasoning_content" and content:
        raise BadRequest(
            "continue_final_message is reasoning_content, and the last message has content after "
            "its reasoning; send content as null or continue the content"
        )
    return BegunAnswer(reasoning, content, part)


def _unpacked(content: str, opens: str, closes: str) -> tuple[str, str, bool]:
    """Return the reasoning at the content's beginning, the rest, and whether it was closed."""
    start = content.lstrip()
    before, marker, after = start.removeprefix(opens).partition(closes)
    is_open = start.startswith(opens)
    if not is_open and not (marker and opens not in before):
        return "", content, False
    return before.strip("\n"), without_harmony(after)[1].lstrip("\n"), bool(marker)


def begun_prompt(
    messages: Sequence[Mapping[str, Any]],
    begun: BegunAnswer,
    markers: tuple[str, str] | None,
    render: RenderMessages,
) -> str:
    """Return the prompt that ends with the begun answer. `messages` are those before it.

    Raises BadRequest, also for a template that refuses the messages.
    """
    mark = _MARK
    while any(mark in str(message) for message in (*messages, begun)):
        mark += "-"
    turn: MessageFields = {"role": "assistant", "content": begun.content}
    if begun.reasoning or begun.is_reasoning:
        turn["reasoning_content"] = begun.reasoning
    turn[begun.part] += mark
    text, there, _ = render([*messages, turn], False).rpartition(mark)
    if there and _is_right(text, _header_start(messages, text, render), begun, markers):
        return text
    before = messages or ({"role": "user", "content": ""},)
    return _written(render(before, True), begun, markers)


def _header_start(messages: Sequence[Mapping[str, Any]], text: str, render: RenderMessages) -> int:
    """Return where the begun turn starts in `text`."""
    try:
        before = render(messages, False) if messages else ""
    except BadRequest:
        return 0
    return n_common(text, before)


def _is_right(text: str, start: int, begun: BegunAnswer, markers: tuple[str, str] | None) -> bool:
    """True if the turn has all of its text, and ends inside reasoning only where it should."""
    turn = text[start:]
    last = begun.reasoning if begun.is_reasoning else begun.content
    if not turn.rstrip().endswith(last.strip()):
        return False
    if markers is None:
        return True
    opens, closes = markers
    is_inside = turn.rfind(opens) > turn.rfind(closes)
    has_reasoning = begun.reasoning.strip() in turn
    return has_reasoning and is_inside == begun.is_reasoning and turn.count(opens) <= 1


def _written(prompt: str, begun: BegunAnswer, markers: tuple[str, str] | None) -> str:
    """Return `prompt`, which ends with the header of an answer, with the begun answer behind it."""
    if markers is None:
        return prompt + begun.content
    opens, closes = map(re.escape, markers)
    end = re.search(rf"(?:{opens}(?P<space>\s*))?(?P<closed>{closes}\s*)?\Z", prompt)
    assert end is not None  # the pattern matches the empty text too
    is_open = end["space"] is not None and end["closed"] is None
    if not begun.reasoning and not begun.is_reasoning and not is_open:
        return prompt + begun.content
    opens, closes = markers
    space = ("\n" if opens == "<think>" else "") if end["space"] is None else end["space"][:1]
    opened = prompt[: end.start()] + opens + space + begun.reasoning
    if begun.is_reasoning:
        return opened
    return opened + space + closes + 2 * space + begun.content
