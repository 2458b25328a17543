"""gpt-oss's format: messages on channels, of which one is the answer.

https://cookbook.openai.com/articles/openai-harmony. The library openai-harmony reads token ids of
its own vocabulary file, which it fetches over the network; here the markers are read as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from specoffload.chat.parsing.output import Output
from specoffload.chat.parsing.reader import Reader, Reading

STARTS = ("<|start|>", "<|channel|>")
BODY = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", *STARTS)
MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")

# What opens the reasoning, what closes it, and what closes it and goes on with the answer.
REASONING = (
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def read_harmony(
    reader: Reader, output: Output, *, with_calls: bool, with_reasoning: bool
) -> Reading[None]:
    """Everything up to the end of the text."""
    first = yield from reader.takes(" to=")  # the role was in the prompt, the recipient is not
    opened: str | None = " to=" if first else None
    while True:
        if opened is None:
            opened = yield from reader.until(STARTS, output.content)
        if opened is None:
            return
        header, marker = yield from reader.within((BODY,))
        header = opened + header
        if marker is None:
            if not reader.is_cut:
                output.content(header)
            return
        opened = yield from _body(
            reader, output, header, with_calls=with_calls, with_reasoning=with_reasoning
        )


def _body(
    reader: Reader, output: Output, header: str, *, with_calls: bool, with_reasoning: bool
) -> Reading[str | None]:
    """One message's text. Gives the marker of the next header, if that ended it."""
    found = _CHANNEL.search(header)
    channel = found[1] if found else "final"
    to = _RECIPIENT.search(header)
    show: Callable[[str], None] = output.content
    raw = False
    if to is not None and with_calls:
        output.begin_call(to[1].removeprefix("functions."))
        show = output.arguments
    elif to is None and channel == "analysis" and with_reasoning:
        show = output.reasoning
    elif to is not None or channel == "analysis":
        raw = True
        output.content(header + BODY)
    end = yield from reader.until(ENDS, show)
    if show == output.arguments and not reader.is_cut:
        output.end_call()
    elif show == output.reasoning:
        output.end_reasoning()
    if raw and end is not None and end not in STARTS:
        output.content(end)
    return end if end in STARTS else None
