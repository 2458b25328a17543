"""Turns conversations into prompts by a model's chat template, with parsers for the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from specoffload.chat.cache_points import cache_ends
from specoffload.chat.conversation import Conversation, ReasoningOptions
from specoffload.chat.families import (
    CHATML,
    GENERIC,
    HARMONY_REASONING,
    CallLayout,
    family_of,
    reasoning_of,
)
from specoffload.chat.grammar import answer_grammar
from specoffload.chat.messages import template_messages
from specoffload.chat.needs import TemplateNeeds
from specoffload.chat.parser import AnswerForm, StreamParser
from specoffload.chat.prefill import BegunAnswer, RenderMessages, begun_answer, begun_prompt
from specoffload.chat.probing import needs_of
from specoffload.chat.templates import check, render, variables_of
from specoffload.chat.tool_schemas import SchemaNote

# The text of all messages, for a model that only continues text. An answer goes on where the text
# before it ends, and every other message begins a line.
_CONTINUED = (
    "{% set so_far = namespace(text='') %}{% for message in messages %}"
    "{% if so_far.text and message.role != 'assistant' and not so_far.text.endswith('\n') %}"
    "{% set so_far.text = so_far.text ~ '\n' %}{% endif %}"
    "{% set so_far.text = so_far.text ~ message.content %}"
    "{% endfor %}{{ so_far.text }}"
)


Unheeded = Literal["enabled", "effort"]
"""A field of `ReasoningOptions` without effect."""


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation, with all that is needed to generate and read its answer. Picklable.

    `text` has its special tokens already; none may be added. `stops` end the answer, as the model's
    end tokens do. `shown` are markers that the engine shows if they are special tokens.
    `grammar` is GBNF that the answer has to follow, with JSON schemas in it. `notes` say what it
    does not enforce of the tools' schemas. `cache_ends` are the numbers of characters of `text`
    before the conversation's cache points, ascending. `unheeded` are wishes about thinking that
    the template cannot fulfil. `unused` are variables that it does not read.
    """

    text: str
    form: AnswerForm
    stops: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    grammar: str | None = None
    notes: tuple[SchemaNote, ...] = ()
    cache_ends: tuple[int, ...] = ()
    unheeded: frozenset[Unheeded] = frozenset()
    unused: tuple[str, ...] = ()

    def parser(self, new_id: Callable[[], str] | None = None) -> StreamParser:
        """Return a new parser for one answer. Each answer needs its own."""
        return StreamParser(self.form, new_id)


@dataclass(frozen=True)
class ChatFormat:
    """A model's chat format. Picklable. Keeps the needs that it has found for each template.

    `templates` are the file's templates by name: "tool_use" is for conversations with tools,
    "default" for others. `begin` is the text of the token that the vocabulary puts before every
    text. It is added to prompts that do not begin with it, as llama.cpp does.
    """

    templates: Mapping[str, str]
    bos: str = ""
    eos: str = ""
    name: str = "of the model file"
    begin: str = ""
    _known: dict[str, TemplateNeeds] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, template: str | None, *, bos: str = "", eos: str = "", begin: str = ""
    ) -> ChatFormat:
        """Return the format of one template; ChatML if there is none."""
        if template:
            return cls({"default": template}, bos, eos, begin=begin)
        return cls({"default": CHATML}, bos, eos, "chatml", begin)

    @classmethod
    def continuing(cls) -> ChatFormat:
        """Return the format of a model that continues text: the messages' text, without markers."""
        return cls({"default": _CONTINUED}, name="of text that is continued")

    def template(self, *, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        return next(iter(self.templates.values()))

    def prepare(
        self, conversation: Conversation, now: Callable[[], datetime] = datetime.now
    ) -> ChatPrompt:
        """Return the prompt of a conversation. Raises BadRequest, also for a fault of the template.

        Time and memory are not limited here. The calling process must limit them.
        """
        moment = now()  # renderings are compared, so they all show the same time
        source = self.template(with_tools=bool(conversation.tools))
        needs = self._needs(source)
        family = family_of(source) if needs.takes_tools or needs.takes_calls else GENERIC
        reasoning = reasoning_of(source)
        markers = HARMONY_REASONING[:2] if family.layout.is_harmony else reasoning

        def written(asked: Conversation) -> tuple[str, BegunAnswer | None]:
            messages, begun = asked.messages, None
            if asked.continues is not None:
                begun = begun_answer(messages[-1], asked.continues, markers)
                messages = messages[:-1] or messages
            render_messages = self._renderer(asked, source, needs, family.layout, lambda: moment)
            if begun is None:
                text = render_messages(messages, asked.add_generation_prompt)
            else:
                text = begun_prompt(asked.messages[:-1], begun, markers, render_messages)
            if not text.startswith(self.begin):
                text = self.begin + text
            return text, begun

        text, begun = written(conversation)
        ends = cache_ends(conversation, text, lambda changed: written(changed)[0])
        if begun is None:
            thinking = reasoning is not None and text.rstrip().endswith(reasoning[0])
        else:
            thinking = begun.is_reasoning
        form = AnswerForm(
            family,
            {tool.name: dict(tool.parameters) for tool in conversation.callable_tools},
            reasoning,
            conversation.reasoning.format,
            thinking,
            None if conversation.parallel_tool_calls else 1,
            in_answer=begun is not None and not begun.is_reasoning,
            must_call=conversation.must_call,
        )
        shown: tuple[str, ...] = ()
        if family.layout.is_harmony:
            shown = family.markers
        elif form.schemas or reasoning:
            shown = (*family.markers, *(reasoning or ()))
        # A model without a template may not know ChatML's end of turn.
        stops = ("<|im_end|>",) if self.template(with_tools=False) == CHATML else ()
        notes: list[SchemaNote] = []
        grammar = answer_grammar(
            conversation,
            family,
            reasoning,
            thinking=thinking,
            in_answer=form.in_answer,
            note=notes.append,
        )
        unheeded = _unheeded(conversation.reasoning, needs, reasons=markers is not None)
        read = variables_of(source)
        unused = tuple(name for name in conversation.template_kwargs if name not in read)
        return ChatPrompt(text, form, stops, shown, grammar, tuple(notes), ends, unheeded, unused)

    def _renderer(
        self,
        conversation: Conversation,
        source: str,
        needs: TemplateNeeds,
        layout: CallLayout,
        now: Callable[[], datetime],
    ) -> RenderMessages:
        """Return the function that renders messages with the conversation's other settings."""
        tools = None
        if needs.takes_tools and conversation.tool_choice != "none" and conversation.tools:
            tools = [tool.as_openai() for tool in conversation.tools]

        def rendered(messages: Sequence[Mapping[str, Any]], answers: bool) -> str:
            asked = replace(conversation, messages=tuple(messages))
            variables = {
                **_reasoning_variables(conversation.reasoning, needs),
                **conversation.template_kwargs,
                "messages": template_messages(asked, needs, layout),
                "tools": tools,
                "add_generation_prompt": answers,
                "bos_token": self.bos,
                "eos_token": self.eos,
            }
            return render(self.name, source, variables, now)

        return rendered

    def _needs(self, source: str) -> TemplateNeeds:
        if source not in self._known:
            check(self.name, source)
            self._known[source] = needs_of(self.name, source, bos=self.bos, eos=self.eos)
        return self._known[source]


def _reasoning_variables(asked: ReasoningOptions, needs: TemplateNeeds) -> dict[str, Any]:
    """Return template variables under the names of Qwen and GLM, DeepSeek-V3.1 and gpt-oss."""
    variables: dict[str, Any] = {}
    if asked.effort is not None:
        variables["reasoning_effort"] = asked.effort
    if asked.enabled is not None:
        variables |= {"enable_thinking": asked.enabled, "thinking": asked.enabled}
        variables |= needs.thinks_with if asked.enabled else needs.thinks_not_with
    return variables


def _unheeded(
    asked: ReasoningOptions, needs: TemplateNeeds, *, reasons: bool
) -> frozenset[Unheeded]:
    """Return the wishes without effect. `reasons`: the model's answers may have reasoning."""
    unheeded: set[Unheeded] = set()
    if asked.enabled is True and not reasons:
        unheeded.add("enabled")
    if asked.enabled is False and reasons and not needs.thinks_not_with:
        unheeded.add("enabled")
    if asked.effort is not None and not needs.takes_effort:
        unheeded.add("effort")
    return frozenset(unheeded)
