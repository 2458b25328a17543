"""The chat command and the server make the same prompt and options of a conversation."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from offload.errors import BadRequest
from specoffload.chat.conversation import ChatSettings, Conversation, ReasoningOptions, Tool
from specoffload.config.options import ChatOptions
from specoffload.config.resolution import chat_settings
from specoffload.errors import UsageError
from specoffload.server.api.context import ServerContext
from specoffload.server.api.parameters import generate_options
from specoffload.server.api.requests import ChatRequest
from specoffload.server.renderer import Renderer
from specoffload.session.card import ModelCard
from specoffload.session.chat import answer, check_options, format_of
from specoffload.session.generation import GenerateOptions, Piece
from specoffload.session.statistics import GenerationStats
from specoffload.terminal.talk import Talk

SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}})
TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATES = {
    "plain": TURN,
    "reasons": TURN + "{# <tool_call> </think> #}<think>{{ enable_thinking }}",
    "harmony": TURN + "{# <|channel|> <|message|> #}{{ tools or '' }}",
}


class _Recording:
    """The part of a session that answers, and what it was asked."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.text = text
        return [1]

    def generate(self, tokens: Sequence[int], options: GenerateOptions) -> Iterator[Piece]:
        self.options = options
        yield Piece("", (), "stop", GenerationStats())


def _card(template: str | None) -> ModelCard:
    return ModelCard("m", 512, 99, "llama", 1, 1, template, bos="<s>", eos="</s>")


@pytest.mark.parametrize("schema", [None, SCHEMA])
@pytest.mark.parametrize("template", [*TEMPLATES.values(), None], ids=[*TEMPLATES, "none"])
def test_both_ask_the_engine_for_the_same(template: str | None, schema: str | None) -> None:
    card = _card(template)
    settings = ChatSettings(
        template_kwargs={"enable_thinking": False}, reasoning=ReasoningOptions(effort="low")
    )
    options = GenerateOptions(stop=("x",), json_schema=schema)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    with closing(Renderer()) as renderer:
        engine: Any = SimpleNamespace(card=card)
        context = ServerContext(engine, renderer, options, settings)
        asking = context.question(Request({"type": "http"}), ChatRequest.model_validate(body))
        question = asyncio.run(asking)
    asked = Conversation(
        tuple(body["messages"]),
        reasoning=settings.reasoning_with(settings.template_kwargs),
        template_kwargs=settings.template_kwargs,
    )
    session: Any = _Recording()
    _, parts = answer(session, format_of(card, settings), asked, options)
    assert list(parts)
    assert session.text == question.job.text
    assert session.options == question.job.options
    if schema is not None and template in (TEMPLATES["reasons"], TEMPLATES["harmony"]):
        assert session.options.json_schema is None  # it is in the format's grammar
        assert SCHEMA in (session.options.grammar or "")
        assert session.options.shown or template == TEMPLATES["reasons"]


def test_a_grammar_and_a_forced_call_exclude_each_other() -> None:
    tool = Tool("f")
    asked = Conversation(({"role": "user", "content": "x"},), (tool,), "required")
    with pytest.raises(BadRequest, match="exclude each other"):
        check_options(asked, GenerateOptions(grammar='root ::= "x"'))
    check_options(asked, GenerateOptions())


def test_the_effort_none_turns_reasoning_off() -> None:
    settings = ChatSettings(reasoning=ReasoningOptions("none", True, "high"))
    assert settings.reasoning_with({}) == ReasoningOptions("none", True, "high")
    assert settings.reasoning_with({}, effort="none") == ReasoningOptions("none", False, None)
    found = settings.reasoning_with({"enable_thinking": False}, form="deepseek")
    assert found == ReasoningOptions("deepseek", False, "high")


@pytest.mark.parametrize(("given", "budget"), [(5, 5), (0, 0), (-1, None), (None, 9)])
def test_a_request_may_limit_its_reasoning(given: int | None, budget: int | None) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "thinking_budget_tokens": given}
    request = ChatRequest.model_validate(body)
    options, idle = generate_options(request, GenerateOptions(reasoning_budget=9))
    assert (options.reasoning_budget, idle) == (budget, ())


def test_a_built_in_template_leaves_the_first_token_to_the_vocabulary() -> None:
    for adds, name, wanted in (
        (True, "gemma", "<s><start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"),
        (False, "gemma", "<start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"),
        (True, "gigachat", "<s>user<|role_sep|>x<|message_sep|>"),
        (True, "{{ messages[0].content }}", "x"),
    ):
        card = replace(_card(None), adds_bos=adds)
        form = format_of(card, chat_settings(ChatOptions(template=name)))
        conversation = Conversation(({"role": "user", "content": "x"},))
        assert form.prepare(conversation).text.startswith(wanted)
        assert not form.prepare(conversation).text.startswith("<s><s>")


def test_a_pipe_in_place_of_a_file_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="not a regular file"):
        chat_settings(ChatOptions(template=str(pipe)))
    with pytest.raises(UsageError, match="not a regular file"):
        Talk(lambda conversation: iter(())).load(pipe)  # type: ignore[arg-type,return-value]
