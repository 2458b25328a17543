"""A model's chat format, made of its template: conversations to prompts, and answers to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from specoffload.chat.built_in import BUILT_IN, CHATML
from specoffload.chat.conversation import Conversation
from specoffload.chat.environment import check, render
from specoffload.chat.families import GENERIC, family_of, reasoning_of
from specoffload.chat.family import Family, HarmonyCalls
from specoffload.chat.grammar import Asked, answer_grammar
from specoffload.chat.messages import Needs, needs_of, template_messages
from specoffload.chat.parsing.stream import AnswerForm, StreamParser


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation, and all that generating and reading its answer takes. Picklable.

    `text` has its special tokens written out, none is to be added. `stops` end the answer besides
    the model's own end tokens. `shown` are markers that the engine shows where they are special
    tokens. `grammar` is GBNF that the answer has to follow, with JSON schemas in it.
    """

    text: str
    form: AnswerForm
    stops: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    grammar: str | None = None

    def parser(self, new_id: Callable[[], str] | None = None) -> StreamParser:
        """A parser of one answer to this prompt; each of `n` answers has its own."""
        return StreamParser(self.form, new_id)


@dataclass(frozen=True)
class ChatFormat:
    """`templates` are the file's, by name; "default" is the one without a name, "tool_use" is
    taken for conversations with tools. `begin` is the text of the token that the vocabulary puts
    before every text: a built-in template leaves it to the tokenizer. Picklable; what it finds out
    of the templates is kept."""

    templates: Mapping[str, str]
    bos: str = ""
    eos: str = ""
    name: str = "of the model file"
    begin: str = ""
    _known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, template: str | None, *, bos: str = "", eos: str = "", begin: str = ""
    ) -> ChatFormat:
        """Of one template; ChatML where there is none."""
        if template:
            return cls({"default": template}, bos, eos)
        return cls({"default": CHATML}, bos, eos, "chatml", begin)

    @property
    def _stops(self) -> tuple[str, ...]:
        """A model without a template may not know that ChatML's end of turn is one."""
        return ("<|im_end|>",) if self.template(with_tools=False) == CHATML else ()

    def template(self, *, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        return next(iter(self.templates.values()))

    def prepare(
        self, conversation: Conversation, now: Callable[[], datetime] = datetime.now
    ) -> ChatPrompt:
        """Renders the conversation. Raises BadRequest, also for whatever the template does.

        Neither time nor memory is bounded here: that is up to the process it runs in.
        """
        source = self.template(with_tools=bool(conversation.tools))
        needs = self._needs(source)
        family = family_of(source) if needs.takes_tools or needs.takes_calls else GENERIC
        messages = template_messages(conversation, needs, family.layout)
        begun = ""
        if conversation.continues:
            begun = conversation.messages[-1].get("content") or ""
            messages.pop()
        variables = {
            **_reasoning_variables(conversation),
            **conversation.template_kwargs,
            "messages": messages,
            "tools": _tools(conversation, needs),
            "add_generation_prompt": conversation.add_generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
        }
        text = render(self.name, source, variables, now)
        if source in BUILT_IN.values() and not text.startswith(self.begin):
            text = self.begin + text
        if begun:
            text = _answered(text, begun, reasoning_of(source))
        return self._asked(conversation, family, source, text)

    def _needs(self, source: str) -> Needs:
        if source not in self._known:
            check(self.name, source)
            self._known[source] = needs_of(self.name, source, bos=self.bos, eos=self.eos)
        found = self._known[source]
        assert isinstance(found, Needs)
        return found

    def _asked(
        self, conversation: Conversation, family: Family, source: str, text: str
    ) -> ChatPrompt:
        tools = conversation.callable_tools
        reasoning = reasoning_of(source)
        thinking = reasoning is not None and text.rstrip().endswith(reasoning[0])
        form = AnswerForm(
            family,
            {tool.name: dict(tool.parameters) for tool in tools},
            reasoning,
            conversation.reasoning.format,
            thinking,
            None if conversation.parallel_tool_calls else 1,
        )
        asked = Asked(
            family,
            tools,
            conversation.must_call,
            conversation.parallel_tool_calls,
            reasoning,
            thinking,
            conversation.schema,
        )
        shown = (*family.markers, *(reasoning or ())) if tools or reasoning else ()
        if isinstance(family.calls, HarmonyCalls):
            shown = family.markers
        return ChatPrompt(text, form, self._stops, shown, answer_grammar(asked))


def _answered(text: str, begun: str, reasoning: tuple[str, str] | None) -> str:
    """The prompt with the beginning of the answer, after reasoning that the prompt has opened."""
    if reasoning is not None and text.rstrip().endswith(reasoning[0]):
        return text + reasoning[1] + begun
    return text + begun


def _tools(conversation: Conversation, needs: Needs) -> list[dict[str, Any]] | None:
    if not needs.takes_tools or conversation.tool_choice == "none" or not conversation.tools:
        return None
    return [tool.as_openai() for tool in conversation.tools]


def _reasoning_variables(conversation: Conversation) -> dict[str, Any]:
    """The names by which templates ask: Qwen's and GLM's, DeepSeek-V3.1's, gpt-oss's."""
    asked = conversation.reasoning
    found: dict[str, Any] = {}
    if asked.enabled is not None:
        found |= {"enable_thinking": asked.enabled, "thinking": asked.enabled}
    if asked.effort is not None:
        found["reasoning_effort"] = asked.effort
    return found
