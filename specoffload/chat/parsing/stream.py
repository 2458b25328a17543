"""The parser of one answer."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specoffload.chat.conversation import ReasoningFormat
from specoffload.chat.deltas import Delta
from specoffload.chat.family import Family, HarmonyCalls, MistralCalls, openers
from specoffload.chat.parsing.harmony import read_harmony
from specoffload.chat.parsing.json_calls import (
    JsonCalls,
    NamedCalls,
    read_json_calls,
    read_named_calls,
    read_wrapped_calls,
)
from specoffload.chat.parsing.output import Output
from specoffload.chat.parsing.reader import Reader, Reading
from specoffload.chat.parsing.tagged_calls import TaggedCalls, read_tagged_calls

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class AnswerForm:
    """The form in which an answer is written. `schemas`, by tool name, is empty where no call may
    be made: then nothing is taken for one.

    `reasoning` are its markers; `thinking` is True where the prompt has opened it already.
    """

    family: Family
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasoning: tuple[str, str] | None = None
    reasoning_format: ReasoningFormat = "auto"
    thinking: bool = False
    most_calls: int | None = None


def _new_id(length: int | None) -> str:
    if length is not None:
        return "".join(secrets.choice(_ALPHABET) for _ in range(length))
    return "call_" + secrets.token_hex(12)


class StreamParser:
    """Reads an answer's text in pieces of any size; the deltas join to the same message.

    The possible beginning of a marker is held back until it is known. Text that only looks
    like a tool call is content, so nothing is lost of an answer that ended by itself. An answer
    that a limit cut within a call or a marker ends before that part, which is no content.
    """

    def __init__(self, form: AnswerForm, new_id: Callable[[], str] | None = None) -> None:
        self._form = form
        self._reader = Reader()
        make_id = new_id or (lambda: _new_id(form.family.id_length))
        self._output = Output(make_id, form.most_calls)
        self._run: Reading[None] | None = self._read()
        self._step()

    @property
    def n_calls(self) -> int:
        """Tool calls begun so far."""
        return self._output.n_calls

    @property
    def is_reasoning(self) -> bool:
        """True while the text so far ends within the reasoning."""
        return self._output.is_reasoning

    def feed(self, text: str) -> list[Delta]:
        """The deltas that `text` adds."""
        self._reader.feed(text)
        self._step()
        return self._output.take()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """The deltas of the text held back, when none follows. `cut`: a limit ended the text."""
        self._reader.end(cut=cut)
        self._step()
        assert self._run is None
        self._output.end()
        return self._output.take()

    def _step(self) -> None:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None

    def _read(self) -> Reading[None]:
        form, reader, output = self._form, self._reader, self._output
        with_reasoning = form.reasoning_format != "none"
        if isinstance(form.family.calls, HarmonyCalls):
            yield from read_harmony(
                reader, output, with_calls=bool(form.schemas), with_reasoning=with_reasoning
            )
            return
        if form.reasoning is not None and with_reasoning:
            yield from self._reasoning(*form.reasoning)
        yield from self._answer()

    def _reasoning(self, opens: str, closes: str) -> Reading[None]:
        reader, output, form = self._reader, self._output, self._form
        if not form.thinking:
            reader.mark()
            yield from reader.space()
            if not (yield from reader.takes(opens)):
                reader.back()
                return
            reader.release()
        openers = self._openers() if form.family.ends_reasoning else ()
        legacy = form.reasoning_format == "deepseek-legacy"

        def show(text: str) -> None:
            output.reasoning(text)
            if legacy:
                output.content(text)

        if legacy:
            output.content(opens)
        marker = yield from reader.until((closes, *openers), show)
        output.end_reasoning()
        if legacy and marker == closes:
            output.content(closes)
        if marker is not None and marker != closes:
            reader.put_back(marker)

    def _openers(self) -> tuple[str, ...]:
        """The markers that begin a tool call."""
        return openers(self._form.family.calls) if self._form.schemas else ()

    def _answer(self) -> Reading[None]:
        reader, output = self._reader, self._output
        calls = self._form.family.calls
        if self._form.schemas and isinstance(calls, JsonCalls) and not calls.opens:
            yield from self._bare_calls(calls)
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

    def _bare_calls(self, calls: JsonCalls) -> Reading[None]:
        """Calls without a marker, which an answer can only begin with."""
        reader, output, known = self._reader, self._output, self._form.schemas
        for read in (read_wrapped_calls, read_json_calls) if calls.wrapper else (read_json_calls,):
            reader.mark()
            yield from reader.space()
            yield from reader.takes_one(calls.may_begin)
            if (yield from read(reader, output, calls, known)) or reader.is_cut:
                reader.release()
                return
            reader.back()

    def _calls(self, opened: str) -> Reading[bool]:
        reader, output, form = self._reader, self._output, self._form
        calls = form.family.calls
        if isinstance(calls, MistralCalls):
            yield from reader.space()
            listed = (yield from reader.peek()) in ("[", "{")
            calls = calls.listed if listed else calls.named
        if isinstance(calls, JsonCalls):
            return (yield from read_json_calls(reader, output, calls, None))
        if isinstance(calls, NamedCalls):
            return (yield from read_named_calls(reader, output, calls, opened))
        assert isinstance(calls, TaggedCalls)
        return (yield from read_tagged_calls(reader, output, calls, form.schemas, opened))
