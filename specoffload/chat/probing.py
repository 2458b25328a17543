"""Finds out what a chat template takes, by rendering small conversations.

A message whose text is missing from the result counts as refused: some templates raise an error,
others drop what they do not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from offload.errors import BadRequest
from specoffload.chat.conversation import Tool
from specoffload.chat.messages import in_form
from specoffload.chat.needs import TemplateNeeds
from specoffload.chat.templates import render
from specoffload.chat.turns import MessageFields, TurnKind, TurnLimits

_KEY = "needle_key"
_TOOL = Tool(
    "needle_tool",
    "A probe.",
    {"type": "object", "properties": {_KEY: {"type": "integer", "description": "A probe."}}},
)
_ID = "call_0123456789abcdefABCDEF01"  # as OpenAI's server makes them
_SHORT_ID = "call00000"
_FILLERS = ("", " ", "...")


def needs_of(name: str, source: str, *, bos: str, eos: str) -> TemplateNeeds:
    """Return what a template takes. `name` is for errors, which never leave this function."""
    probe = _Probe(name, source, bos, eos)
    _find_form(probe)
    probe.needs = dataclasses.replace(probe.needs, limits=_limits(probe))
    _find_switches(probe)
    return probe.needs


class _Probe:
    """Renders conversations in the form that is known so far."""

    def __init__(self, name: str, source: str, bos: str, eos: str) -> None:
        self._name, self._source = name, source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self.needs = TemplateNeeds()

    def learn(self, **needs: Any) -> None:
        self.needs = dataclasses.replace(self.needs, **needs)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: bool = False,
        answers: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the rendered text; empty if the template refuses the messages.

        `tools`: with the tool. `answers`: with the beginning of an answer. `more`: more variables.
        """
        variables = {
            "messages": in_form(messages, self.needs),
            "tools": [_TOOL.as_openai()] if tools else None,
            "add_generation_prompt": answers,
            **self._tokens,
            **(more or {}),
        }
        try:
            return render(self._name, self._source, variables)
        except BadRequest:
            return ""

    def takes(self, *messages: MessageFields, answers: bool = False) -> bool:
        """True if the template renders all texts, names of calls and arguments of `messages`."""
        calls = any(message.get("tool_calls") for message in messages)
        needles = list(_needles(messages))
        # A template for conversations with tools may fail without them (Hermes' tool_use).
        tried = (True,) if calls and self.needs.takes_tools else (False, self.needs.takes_tools)
        return any(
            bool(text := self.text(messages, tools=tools, answers=answers))
            and all(needle in text for needle in needles)
            for tools in tried
        )

    def drops(self, needle: str, *messages: MessageFields) -> bool:
        """True if the template takes `messages`, but writes no `needle`."""
        text = self.text(messages, tools=True) or self.text(messages)
        return bool(text) and needle not in text


# ---- messages with texts that can be found again


class _ProbeTexts:
    """Makes messages, each with a text of its own."""

    def __init__(self) -> None:
        self._n = 0

    def message(self, role: str, **more: Any) -> MessageFields:
        self._n += 1
        return {"role": role, "content": f"needle{self._n}x", **more}

    def call(self, n: int = 1, *, call_id: str = _SHORT_ID, **more: Any) -> MessageFields:
        """Return an answer without content that makes `n` calls."""
        calls = []
        for _ in range(n):
            self._n += 1
            function = {"name": _TOOL.name, "arguments": {f"{_KEY}{self._n}x": self._n}}
            calls.append({"id": call_id, "type": "function", "function": function})
        return {"role": "assistant", "content": "", "tool_calls": calls, **more}

    def result(self, call_id: str = _SHORT_ID) -> MessageFields:
        return self.message("tool", tool_call_id=call_id, name=_TOOL.name)


def _needles(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield message["content"].strip() if "needle" in message["content"] else ""
        for call in message.get("tool_calls") or ():
            yield from call["function"]["arguments"]


# ---- the form of messages


def _find_form(probe: _Probe) -> None:
    texts = _ProbeTexts()
    user, system = texts.message("user"), texts.message("system")
    if not probe.takes(user):
        probe.learn(content_as_parts=True)
        as_parts = probe.text([user])
        if user["content"] not in as_parts or "'text'" in as_parts:
            probe.learn(content_as_parts=False)
    probe.learn(takes_tools=_TOOL.name in probe.text([user], tools=True))
    called, result = texts.call(), texts.result()
    key = next(iter(called["tool_calls"][0]["function"]["arguments"]))

    def with_call() -> str:
        whole = [user, called, result]
        return probe.text(whole, tools=True) or probe.text(whole[:2], tools=True)

    as_text = with_call()
    probe.learn(arguments_as_object=True)
    as_object = with_call()
    is_object = key in as_object and f"'{key}'" not in as_object
    text = as_object if is_object else as_text
    probe.learn(
        arguments_as_object=is_object,
        takes_calls=key in text,
        takes_results=result["content"] in text,
    )
    if probe.needs.takes_calls:
        _find_form_of_calls(probe, texts, user)
    has_system = any(
        system["content"] in probe.text([system, user], tools=t) for t in (False, True)
    )
    if has_system and probe.needs.takes_calls and probe.needs.takes_results:
        # Mistral-Nemo's template drops it unless the user's message is the last.
        has_system = not probe.drops(system["content"], system, user, called, result)
    probe.learn(takes_system=has_system)
    probe.learn(reasoning_as_part=_reasons_in_a_part(probe, texts, user))


def _find_form_of_calls(probe: _Probe, texts: _ProbeTexts, user: MessageFields) -> None:
    foreign = [texts.call(call_id=_ID), *([texts.result(_ID)] if probe.needs.takes_results else [])]
    if not probe.takes(user, *foreign):
        for length in (len(_SHORT_ID), *range(1, 41)):
            probe.learn(id_length=length)
            if probe.takes(user, *foreign):
                break
        else:
            probe.learn(id_length=None)
    with_text = len(probe.text([user, *foreign], tools=True))
    probe.learn(calls_without_content=True)
    without = probe.text([user, *foreign], tools=True)
    is_shorter = probe.takes(user, *foreign) and len(without) < with_text and "None" not in without
    probe.learn(calls_without_content=is_shorter)


def _reasons_in_a_part(probe: _Probe, texts: _ProbeTexts, user: MessageFields) -> bool:
    """True if an answer's reasoning is written only if it is a part of the content (Ministral)."""
    thought = "needle-thought"
    answer = texts.message("assistant", reasoning_content=thought)
    if thought in probe.text([user, answer]):
        return False
    probe.learn(reasoning_as_part=True)
    text = probe.text([user, answer])
    probe.learn(reasoning_as_part=False)
    return thought in text and answer["content"] in text and "'thinking'" not in text


# ---- order, number and adjacency


def _limits(probe: _Probe) -> TurnLimits:
    texts = _ProbeTexts()
    user, answer = texts.message("user"), texts.message("assistant")
    others = [texts.message("user"), texts.message("user")]
    ending = [texts.message("assistant"), others[0]]
    calls, results = probe.needs.takes_calls, probe.needs.takes_results
    called, result = texts.call() if calls else texts.message("assistant"), texts.result()
    refused: set[tuple[TurnKind, TurnKind]] = set()

    def test(before: TurnKind, after: TurnKind, *messages: MessageFields) -> None:
        if not probe.takes(*messages):
            refused.add((before, after))

    test("user", "user", user, others[1], *ending)
    test("answer", "answer", user, answer, *ending)
    test("start", "answer", answer, *others[:1])
    if _hides_role(probe, answer, user):
        refused.add(("start", "answer"))
    filler = ""
    if calls:
        then = [result] if results else []
        test("start", "call", called, *then, *ending)
        test("answer", "call", user, answer, called, *then, *ending)
        if not probe.takes(user, called, answers=True):
            refused.add(("call", "end"))
    if results:
        test("result", "user", user, called, result, others[1], *ending)
        for filler in _FILLERS:
            between = {"role": "assistant", "content": filler}
            if probe.takes(user, called, result, between, others[1], *ending):
                break
    several, beside, with_both = _limits_of_calls(probe, texts, user) if calls else (True,) * 3
    empty = {"role": "assistant", "content": ""}
    return TurnLimits(
        frozenset(refused),
        _system(probe, texts),
        several,
        beside,
        with_both,
        probe.takes(user, empty, *others[:1]),
        probe.takes(user, {**empty, "reasoning_content": "needle-thought"}, *others[:1]),
        _needs_user(probe, texts),
        filler,
    )


def _hides_role(probe: _Probe, answer: MessageFields, user: MessageFields) -> bool:
    """True if an answer at the beginning is written as the user's, as Llama-3.1's template does."""
    if not probe.needs.takes_tools:
        return False
    as_answer = probe.text([answer, user], tools=True)
    return as_answer == probe.text([{**answer, "role": "user"}, user], tools=True)


def _limits_of_calls(
    probe: _Probe, texts: _ProbeTexts, user: MessageFields
) -> tuple[bool, bool, bool]:
    """Return whether it takes several calls, content beside calls, and reasoning beside both."""
    results = [texts.result(), texts.result()] if probe.needs.takes_results else []
    several = probe.takes(user, texts.call(2), *results)
    content = texts.message("user")["content"]
    called = texts.call(content=content)
    key = next(iter(called["tool_calls"][0]["function"]["arguments"]))
    text = probe.text([user, called, *results[:1]], tools=True)
    beside = probe.takes(user, called, *results[:1]) and text.index(content) < text.index(key)
    both = {**called, "reasoning_content": "needle-thought"}
    return several, beside, not beside or probe.takes(user, both, *results[:1])


def _system(probe: _Probe, texts: _ProbeTexts) -> Literal["anywhere", "first", "never"]:
    """Return where system messages may stand.

    A template that moves them to the beginning (DeepSeek-V3.1) counts as one that takes them only
    there, because the text before them would change and its KV cache could not be reused.
    """
    if not probe.needs.takes_system:
        return "never"
    roles = ("system", "user", "system", "assistant", "user", "system", "assistant")
    messages = [texts.message(role) for role in roles]
    if not (probe.takes(*messages) and probe.takes(*messages[:6], answers=True)):
        return "first"
    text = probe.text(messages) or probe.text(messages, tools=True)
    places = [text.find(message["content"]) for message in messages]
    return "anywhere" if places == sorted(places) else "first"


def _needs_user(probe: _Probe, texts: _ProbeTexts) -> bool:
    """True if a system message alone is refused, or no answer can begin after it."""
    system, user = texts.message("system"), texts.message("user")
    for tools in (False, probe.needs.takes_tools):
        if system["content"] not in probe.text([system, user], tools=tools):
            continue  # it is refused for another reason
        asked = probe.text([system], tools=tools, answers=True)
        if system["content"] not in asked or asked == probe.text([system], tools=tools):
            return True
    return False


# ---- thinking

# Variables that turn thinking on, and off: those of most families and DeepSeek, and Seed-OSS's.
_SWITCHES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}),
    ({}, {"thinking_budget": 0}),
)


def _find_switches(probe: _Probe) -> None:
    user = _ProbeTexts().message("user")

    def begun(**more: Any) -> str:
        return probe.text([user], answers=True, more=more) or probe.text(
            [user], tools=True, answers=True, more=more
        )

    probe.learn(takes_effort=begun(reasoning_effort="low") != begun(reasoning_effort="high"))
    for on, off in _SWITCHES:
        if begun(**off) not in ("", begun(**on)):
            probe.learn(thinks_with=on, thinks_not_with=off)
            return
    without = {"reasoning_effort": "none"}
    # A template that writes any word (gpt-oss) does not know this one.
    as_word = begun(reasoning_effort="unheard-of").replace("unheard-of", "none")
    if begun(**without) not in ("", as_word):
        probe.learn(thinks_not_with=without)
