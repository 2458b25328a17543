"""Everything that forces or cuts tokens, in pairs, for every published template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from forced_play import Played, play
from published import ASK, NAMES, chat_format, source

from specoffload.chat.conversation import Conversation, Named, ReasoningOptions, Tool
from specoffload.chat.families import family_of, reasoning_of
from specoffload.generation.generation import GenerateOptions

LOOK_UP = Tool(
    "look_up",
    None,
    {
        "type": "object",
        "properties": {"q": {"enum": ["a", "b"]}, "n": {"type": "integer", "maximum": 9}},
        "required": ["q"],
    },
)
TOOLS = (LOOK_UP, Tool("now"))
SCHEMA = json.dumps({"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]})
GBNF = 'root ::= "yes" | "no"\n'
STOPS = ("\n", "}", "<", "lo", "q")
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of conversation and options
    "no reasoning left": ({}, {"reasoning_budget": 0}),
    "little reasoning left": ({}, {"reasoning_budget": 5}),
    "last words": ({}, {"reasoning_budget": 3, "reasoning_budget_message": "\nEnough."}),
    "tools": ({"tools": TOOLS}, {}),
    "strict tools": ({"tools": (replace(LOOK_UP, strict=True),)}, {}),
    "a forced call": ({"tools": TOOLS, "tool_choice": "required"}, {}),
    "a named call": ({"tools": TOOLS, "tool_choice": Named("look_up")}, {}),
    "one call": ({"parallel_tool_calls": False}, {}),
    "begun content": ({"messages": (ASK, {"role": "assistant", "content": "So"})}, {}),
    "begun reasoning": (
        {"messages": (ASK, {"role": "assistant", "content": "", "reasoning_content": "Hm"})},
        {},
    ),
    "stops": ({}, {"stop": STOPS}),
    "a schema": ({"schema": SCHEMA}, {"json_schema": SCHEMA}),
    "a grammar": ({}, {"grammar": GBNF}),
    "no reasoning format": ({"reasoning": ReasoningOptions(format="none")}, {}),
    "no thinking": ({"reasoning": ReasoningOptions(enabled=False)}, {}),
}
EXCLUDED = (  # pairs that a request cannot have
    {"a schema", "a grammar"},
    *({forced, "a grammar"} for forced in ("a forced call", "a named call")),
)
PAIRS = [pair for pair in combinations(FEATURES, 2) if set(pair) not in EXCLUDED]


def of_family(name: str) -> tuple[object, ...]:
    form = chat_format(name).prepare(Conversation((ASK,), TOOLS)).form
    return family_of(source(name)).name, reasoning_of(source(name)), form.thinking


TEMPLATES = list({of_family(name): name for name in NAMES}.values())


def with_features(template: str, *names: str) -> tuple[Conversation, GenerateOptions]:
    asked: dict[str, Any] = {"messages": (ASK,)}
    if template.endswith("tool_use"):  # it refuses other conversations
        asked["tools"] = TOOLS
    options: dict[str, Any] = {"temperature": 0.0}
    for name in names:
        asked |= FEATURES[name][0]
        options |= FEATURES[name][1]
    if any(name.startswith("begun") for name in names):
        asked["continues"] = "auto"
    return Conversation(**asked), GenerateOptions(**options)


def follows_tool(call: Mapping[str, Any]) -> bool:
    n = call.get("n", 0)
    return call.get("q") in ("a", "b") and isinstance(n, int) and n <= 9


def looks_like_a_call(played: Played) -> bool:
    """True for noise with markers that are no call. Within them no stop counts."""
    return any(
        marker in played.raw for marker in ("<|channel|>", "<|end|>", "<｜tool▁calls▁begin｜>")
    )


def check(played: Played, asked: Conversation, options: GenerateOptions) -> None:
    """Check what a client may rely on."""
    message = played.message
    in_content = asked.reasoning.format == "none"
    if options.reasoning_budget is not None and not in_content:
        longest = 20  # bytes of a token
        words = options.reasoning_budget_message
        assert len(message.reasoning) <= options.reasoning_budget * longest + len(words)
    if asked.must_call:
        assert played.is_whole
        assert message.calls
        assert in_content or not message.content.strip()
    if asked.must_call or any(tool.strict for tool in asked.tools):
        for call in message.calls if played.is_whole else ():
            assert call.name == "now" or follows_tool(json.loads(call.arguments)), call
    assert len(message.calls) <= 1 or asked.parallel_tool_calls
    for stop in options.stop:
        assert stop not in message.content or looks_like_a_call(played)
    if in_content or not played.is_whole or options.stop or message.calls or asked.must_call:
        return
    if options.grammar is not None:
        assert message.content in ("yes", "no")
    if options.json_schema is not None:
        assert json.loads(message.content)["x"] in (1, 2)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_pair_of_what_forces_or_cuts_tokens_keeps_its_word(name: str) -> None:
    form = chat_format(name)
    for at, pair in enumerate(PAIRS):
        if "begun reasoning" in pair and of_family(name)[1] is None:
            continue
        asked, options = with_features(name, *pair)
        try:
            played = play(form, asked, options, np.random.default_rng(at))
            check(played, asked, options)
        except Exception as e:
            raise AssertionError(f"{name}: {' and '.join(pair)}: {e!r}") from e
