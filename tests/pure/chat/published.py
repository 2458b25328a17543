"""Templates of published models, and conversations to render them with."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from specoffload.chat.conversation import Conversation, ReasoningOptions, Tool
from specoffload.chat.format import ChatFormat

FOLDER = Path(__file__).parents[2] / "fixtures" / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

WEATHER = Tool(
    "get_weather",
    'Weather of a <city> & the days "ahead", in °C',
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name"},
            "days": {"type": "integer", "minimum": 1},
        },
        "required": ["city"],
    },
)
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich <b>", "days": 2}'},
}
ASK = {"role": "user", "content": "How is <b>Zürich</b> & 'Genève'?\nSoon?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = {
    "plain": Conversation((ASK,)),
    "turns": Conversation(
        (
            SYSTEM,
            ASK,
            {"role": "assistant", "content": "Fine."},
            {"role": "user", "content": "And?"},
        )
    ),
    "tools": Conversation((SYSTEM, ASK), (WEATHER,)),
    "called": Conversation(
        (
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "tool",
                "tool_call_id": "call00001",
                "name": "get_weather",
                "content": "12 °C",
            },
        ),
        (WEATHER,),
    ),
    "reasoned": Conversation(
        (
            ASK,
            {"role": "assistant", "reasoning_content": "Hm.", "content": "Fine."},
            {"role": "user", "content": "And?"},
        ),
        reasoning=ReasoningOptions(enabled=False, effort="low"),
    ),
}


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def chat_format(name: str) -> ChatFormat:
    return ChatFormat.of(source(name), bos="<s>", eos="</s>")
