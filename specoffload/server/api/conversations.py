"""From the body of a chat request to a conversation. Pure."""

from __future__ import annotations

from typing import Any, get_args

from offload.errors import BadRequest
from specoffload.chat.conversation import (
    ChatSettings,
    Conversation,
    Named,
    ReasoningFormat,
    Tool,
    ToolChoice,
)
from specoffload.server.api.requests import (
    ChatMessage,
    ChatToolChoice,
    ConversationRequest,
    ToolParameter,
)

MOST_TOOLS = 1024
_ROLES = ("system", "developer", "user", "assistant", "tool")
_CHOICES: dict[str, ToolChoice] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",  # Mistral's name for it
}


def conversation_of(
    request: ConversationRequest, settings: ChatSettings, schema: str | None = None
) -> Conversation:
    """`schema` is the JSON schema of the answer, if it has to follow one. Raises BadRequest."""
    messages = tuple(_message(at, message) for at, message in enumerate(request.messages))
    if not messages:
        raise BadRequest("messages is empty: at least one message is needed")
    kwargs = {**settings.template_kwargs, **(request.chat_template_kwargs or {})}
    tools = request.tools or []
    if len(tools) > MOST_TOOLS:
        raise BadRequest(f"{len(tools)} tools: at most {MOST_TOOLS} are told to a model")
    ends_with_answer = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    wished = request.continue_final_message
    return Conversation(
        messages,
        tuple(_tool(at, tool) for at, tool in enumerate(tools)),
        _choice(request.tool_choice, has_tools=bool(tools)),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=settings.reasoning_with(
            kwargs, form=_format(request.reasoning_format), effort=request.reasoning_effort
        ),
        template_kwargs=kwargs,
        add_generation_prompt=request.add_generation_prompt is not False,
        continues=ends_with_answer and (settings.continues if wished is None else wished),
        schema=schema,
    )


def _format(name: str | None) -> ReasoningFormat | None:
    known: tuple[ReasoningFormat, ...] = get_args(ReasoningFormat)
    for one in known:
        if name == one:
            return one
    if name is None:
        return None
    raise BadRequest(f"reasoning_format {name[:80]!r} is not one of {', '.join(known)}")


def _tool(at: int, tool: ToolParameter) -> Tool:
    if tool.type != "function" or tool.function is None:
        raise BadRequest(f"tools[{at}]: type {tool.type[:80]!r} is not supported, only function")
    given = tool.function
    return Tool(given.name, given.description, given.parameters or {}, bool(given.strict))


def _choice(choice: str | ChatToolChoice | None, *, has_tools: bool) -> ToolChoice:
    if isinstance(choice, ChatToolChoice):
        if choice.type != "function" or choice.function is None:
            raise BadRequest("tool_choice: an object names a function: {type, function: {name}}")
        return Named(choice.function.name)
    if choice is None:
        return "auto" if has_tools else "none"
    if choice in _CHOICES:
        return _CHOICES[choice]
    raise BadRequest(f"tool_choice {choice[:80]!r} is not one of auto, none, required")


def _message(at: int, message: ChatMessage) -> dict[str, Any]:
    where = f"messages[{at}]"
    if message.role not in _ROLES:
        raise BadRequest(f"{where}: role {message.role[:80]!r} is not one of {', '.join(_ROLES)}")
    calls = [
        {
            "id": call.id or f"call_{at}_{i}",
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": {} if call.function.arguments is None else call.function.arguments,
            },
        }
        for i, call in enumerate(message.tool_calls or ())
    ]
    if calls and message.role != "assistant":
        raise BadRequest(f"{where}: only the assistant has tool_calls")
    others = {
        "tool_calls": calls,
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_call_id": message.tool_call_id,
    }
    result: dict[str, Any] = {"role": message.role, "content": _content(where, message)}
    return result | {name: value for name, value in others.items() if value}


def _content(where: str, message: ChatMessage) -> str:
    if message.content is None:
        if message.role == "assistant":
            return ""  # the message has tool calls or reasoning
        raise BadRequest(f"{where}: content is missing")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        text = (part.model_extra or {}).get("refusal") if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or not isinstance(text, str):
            raise BadRequest(
                f"{where}: a part of type {part.type[:80]!r} is not supported, only text"
            )
        texts.append(text)
    return "".join(texts)
