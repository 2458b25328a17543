"""Parses an answer into reasoning, text and tool calls in the format of the model's family."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.sampling.answer_start import CallSpan, ReasoningSpan
from specoffload.chat.calls import (
    read_json_calls,
    read_marked_calls,
    read_wrapped_calls,
)
from specoffload.chat.conversation import Delta, ReasoningFormat
from specoffload.chat.families import (
    HARMONY_ANSWERS,
    HARMONY_BODY,
    HARMONY_CALL,
    HARMONY_ENDS,
    HARMONY_STARTS,
    Family,
)
from specoffload.chat.reader import DeltaCollector, ReadingSteps, TextReader

_ALPHABET = string.ascii_letters + string.digits
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class AnswerForm:
    """The form in which an answer is read.

    `schemas` has the JSON schemas of arguments by the tools' names. If it is empty, text that looks
    like a call is content. `reasoning` has the two markers around the reasoning. `thinking` is True
    if the prompt ends inside the reasoning. Calls beyond `most_calls` are dropped. `in_answer` is
    True if the prompt ends inside the answer's text, which the model continues. `must_call` is True
    if a grammar makes the answer consist of calls.
    """

    family: Family
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasoning: tuple[str, str] | None = None
    reasoning_format: ReasoningFormat = "auto"
    thinking: bool = False
    most_calls: int | None = None
    in_answer: bool = False
    must_call: bool = False

    @property
    def call_span(self) -> CallSpan | None:
        """The markers of tool calls; None if text that looks like a call is content."""
        if not self.schemas:
            return None
        layout = self.family.layout
        opens = (HARMONY_CALL,) if layout.is_harmony else layout.openers
        closes = layout.closers[-1] if layout.closers else ""
        return CallSpan(
            opens or (layout.begin + layout.before_name,), closes, is_open=self.must_call
        )

    @property
    def span(self) -> ReasoningSpan | None:
        """The reasoning before the answer's text; None if the text is all answer."""
        if self.in_answer or self.reasoning_format == "none":
            return None
        if self.family.layout.is_harmony:
            return ReasoningSpan("", HARMONY_ANSWERS, is_open=True)
        if self.reasoning is None:
            return None
        opens, closes = self.reasoning
        return ReasoningSpan(opens, (closes,), self.thinking)


class StreamParser:
    """Reads an answer's text in pieces. The joined deltas do not depend on the pieces' sizes.

    Text that may be the beginning of a marker is held back until more text decides. Text that only
    looks like a tool call is content, so no text is lost if the answer ended by itself. If a limit
    cut the answer inside a marker or a call's name, that beginning is dropped.
    """

    def __init__(self, form: AnswerForm, new_id: Callable[[], str] | None = None) -> None:
        self._form = form
        self._reader = TextReader()
        self._output = DeltaCollector(
            new_id or self._new_id,
            form.most_calls,
            hides_reasoning=form.reasoning_format == "hidden",
        )
        self._run: ReadingSteps[None] | None = self._read()
        self._step()

    @property
    def is_reasoning(self) -> bool:
        """True while the text so far ends inside the reasoning."""
        return self._output.is_reasoning

    def feed(self, text: str) -> list[Delta]:
        """Read `text`, and return the deltas that it adds."""
        self._reader.feed(text)
        self._step()
        return self._output.take()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """End the text, and return the deltas held back. `cut`: a limit ended the text."""
        self._reader.end(cut=cut)
        self._step()
        assert self._run is None
        self._output.end()
        return self._output.take()

    def _new_id(self) -> str:
        length = self._form.family.id_length
        if length is not None:
            return "".join(secrets.choice(_ALPHABET) for _ in range(length))
        return "call_" + secrets.token_hex(12)

    def _step(self) -> None:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None

    def _read(self) -> ReadingSteps[None]:
        form = self._form
        with_reasoning = form.reasoning_format != "none"
        if form.family.layout.is_harmony:
            yield from self._harmony(with_reasoning=with_reasoning)
            return
        if form.reasoning is not None and not form.in_answer:
            if with_reasoning:
                yield from self._reasoning(*form.reasoning)
            elif form.schemas:
                yield from self._reasoning_as_content(*form.reasoning)
        yield from self._answer()

    def _reasoning(self, opens: str, closes: str) -> ReadingSteps[None]:
        reader, output, form = self._reader, self._output, self._form
        if not form.thinking:
            reader.mark()
            yield from reader.space()
            if not (yield from reader.takes(opens)):
                reader.back_unless_cut()
                return
            reader.release()
        legacy = form.reasoning_format == "deepseek-legacy"

        def show(text: str) -> None:
            output.reasoning(text)
            if legacy:
                output.content(text)

        if legacy:
            output.content(opens)
        marker = yield from reader.until(self._reasoning_ends(closes), show)
        output.end_reasoning()
        if legacy and marker == closes:
            output.content(closes)
        if marker is not None and marker != closes:
            reader.put_back(marker)

    def _reasoning_as_content(self, opens: str, closes: str) -> ReadingSteps[None]:
        """Leave the reasoning in the content, and read no calls in it."""
        reader, output = self._reader, self._output
        reader.mark()
        yield from reader.space()
        begins = self._form.thinking or (yield from reader.takes(opens))
        reader.back()
        if not begins:
            return
        marker = yield from reader.until(self._reasoning_ends(closes), output.content)
        if marker == closes:
            output.content(closes)
        elif marker is not None:
            reader.put_back(marker)

    def _reasoning_ends(self, closes: str) -> tuple[str, ...]:
        return closes, *(self._openers() if self._form.family.ends_reasoning else ())

    @property
    def _has_bare_calls(self) -> bool:
        """True if calls have no marker. They begin an answer, or follow a begun one."""
        form, layout = self._form, self._form.family.layout
        begins = form.must_call or not form.in_answer
        return bool(form.schemas) and layout.is_json and not layout.openers and begins

    def _openers(self) -> tuple[str, ...]:
        """Return the markers that begin a tool call; empty if no call may be made."""
        return self._form.family.layout.openers if self._form.schemas else ()

    def _answer(self) -> ReadingSteps[None]:
        reader, output = self._reader, self._output
        if self._has_bare_calls:
            yield from self._bare_calls()
        openers = self._openers()
        while True:
            marker = yield from reader.until(openers, output.content)
            if marker is None:
                return
            reader.mark()
            if (yield from self._calls(marker)) or reader.is_cut:
                reader.release()
            else:
                reader.back()
                output.content(marker)

    def _bare_calls(self) -> ReadingSteps[None]:
        """Read calls that have no marker. They must begin the answer and name known tools."""
        reader, output, form = self._reader, self._output, self._form
        layout = form.family.layout
        for read in (read_wrapped_calls, read_json_calls) if layout.wrapper else (read_json_calls,):
            reader.mark()
            yield from reader.space()
            for marker in form.family.markers:
                if (yield from reader.takes(marker)):
                    break
            if (yield from read(reader, output, layout, form.schemas)) or reader.is_cut:
                reader.release()
                return
            reader.back()

    def _calls(self, opened: str) -> ReadingSteps[bool]:
        reader, output, form = self._reader, self._output, self._form
        layout = form.family.layout
        is_json = layout.is_json
        if layout.id_marker:  # Mistral's models may write a list of objects instead
            yield from reader.space()
            is_json = (yield from reader.peek()) in ("[", "{")
        if is_json:
            return (yield from read_json_calls(reader, output, layout, None))
        return (yield from read_marked_calls(reader, output, layout, form.schemas, opened))

    # ---- gpt-oss: messages on channels, one of which is the answer

    def _harmony(self, *, with_reasoning: bool) -> ReadingSteps[None]:
        """Read an answer of gpt-oss (https://cookbook.openai.com/articles/openai-harmony).

        The library openai-harmony reads token ids of its own vocabulary, which it downloads. Here
        the markers are read as text.
        """
        reader, output = self._reader, self._output
        opened: str | None = None
        if self._form.thinking or self._form.in_answer:  # the prompt has the header
            channel = "analysis" if self._form.thinking else "final"
            header = f"<|channel|>{channel}"
            opened = yield from self._harmony_body(header, with_reasoning=with_reasoning)
        elif (yield from reader.takes(" to=")):  # the prompt has the role, but not the recipient
            opened = " to="
        while True:
            if opened is None:
                opened = yield from reader.until(HARMONY_STARTS, output.content)
            if opened is None:
                return
            header, marker = yield from reader.within((HARMONY_BODY,))
            header = opened + header
            if marker is None:
                if not reader.is_cut:
                    output.content(header)
                return
            opened = yield from self._harmony_body(header, with_reasoning=with_reasoning)

    def _harmony_body(self, header: str, *, with_reasoning: bool) -> ReadingSteps[str | None]:
        """Read one message's text. Returns the next header's marker if that marker ended it."""
        reader, output = self._reader, self._output
        match = _CHANNEL.search(header)
        channel = match[1] if match else "final"
        to = _RECIPIENT.search(header)
        kind = "raw" if to is not None or channel == "analysis" else "content"
        if to is not None and self._form.schemas:
            kind = "call"
            output.begin_call(to[1].removeprefix("functions."))
        elif to is None and channel == "analysis" and with_reasoning:
            kind = "reasoning"
        elif kind == "raw":
            output.content(header + HARMONY_BODY)
        shows = {"call": output.arguments, "reasoning": output.reasoning}
        end = yield from reader.until(HARMONY_ENDS, shows.get(kind, output.content))
        if kind == "call" and not reader.is_cut:
            output.end_call()
        elif kind == "reasoning":
            output.end_reasoning()
        elif kind == "raw" and end is not None and end not in HARMONY_STARTS:
            output.content(end)
        return end if end in HARMONY_STARTS else None
