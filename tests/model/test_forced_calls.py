"""The embedded pair writes forced calls after limited reasoning, with drafts and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from resolved import config_of

from specoffload.chat.conversation import Conversation, Message, Tool, joined
from specoffload.chat.format import ChatFormat
from specoffload.config.speculation import NO_DRAFTS
from specoffload.generation.generation import GenerateOptions, TextPiece
from specoffload.session.chat import answer
from specoffload.session.session import Session

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"
NAMES = ("openai-gpt-oss-120b", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1", "GLM-4.6")
TOOL = Tool(
    "look_up",
    None,
    {"type": "object", "properties": {"q": {"enum": ["a", "b"]}}, "required": ["q"]},
)
ASK = {"role": "user", "content": "def f(x):"}


def message_of(session: Session, name: str, asked: dict[str, Any], **options: Any) -> Message:
    form = ChatFormat.of((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    wanted = GenerateOptions(n_predict=160, temperature=1.0, seed=3, **options)
    conversation = Conversation((ASK,), **asked)
    parts = answer(session, form, conversation, wanted)[1]
    return joined(part for part in parts if not isinstance(part, TextPiece))


@pytest.mark.parametrize("rule", ["match", "reject", "no drafts"])
def test_limit_call_grammar_and_stops_agree(rule: str) -> None:
    common: dict[str, Any] = {"device": "cpu", "threads": 1, "ctx_size": 1024}
    drafts = {"--spec-policy": "fixed", "--spec-draft-n-max": 4, "--spec-accept": rule}
    how = {"spec": NO_DRAFTS} if rule == "no drafts" else {"spec_given": drafts}
    forced = {"tools": (TOOL,), "tool_choice": "required", "parallel_tool_calls": False}
    with Session(config_of(**common, **how)) as session:
        for name in NAMES:
            for budget in (0, 6):
                found = message_of(
                    session, name, forced, reasoning_budget=budget, stop=("\n", "}", "a"), n_probs=2
                )
                (call,) = found.calls
                assert json.loads(call.arguments)["q"] in ("a", "b")
                assert not found.content.strip()
                answered = message_of(
                    session, name, {}, reasoning_budget=budget, grammar='root ::= "yes" | "no"'
                )
                assert answered.content in ("yes", "no")
