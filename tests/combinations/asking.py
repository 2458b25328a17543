"""Bodies of requests for each API, and what their answers have in common."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from combinations.cases import Case

Body = dict[str, Any]
PATHS = {
    "chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages",
    "completions": "/v1/completions", "native": "/completion",
}  # fmt: skip
WORDS = ("red", "green", "blue")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"$ref": "#/$defs/Colour"}, "n": {"type": "integer"}},
    "required": ["colour"],
    "additionalProperties": False,
    "$defs": {"Colour": {"type": "string", "enum": list(WORDS)}},
}
TOOL = "paint"
LONG, SHORT = 160, 8  # most tokens of an answer
RAW = ("completions", "native")  # APIs whose prompt is one text
STOP = "return"


@dataclass
class Reply:
    """An answer in the terms of no API."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments)
    reason: str = ""  # why it ended, in the API's word
    n_prompt: int = 0
    n_answer: int = 0
    raw: Any = None  # what is sent back in the next turn


def body_of(case: Case, question: str, turns: Sequence[Mapping[str, Any]] = ()) -> Body:
    """The body of a request. `turns` are messages between the system's and the question.

    For an API of `RAW` it is the chat whose rendered prompt `raw_body` continues.
    """
    api = "chat" if case["api"] in RAW else case["api"]
    system = "You paint houses."
    parts: Any = [*_image(api), _text(api, question)] if case["media"] == "image" else question
    asked: list[Any] = [*turns, *_earlier(api, case), {"role": "user", "content": parts}]
    if case["history"] in ("tool result", "image in a result"):
        asked += _tool_turn(api, with_image=case["history"] == "image in a result")
    if case["prefill"] == "begun":
        asked.append({"role": "assistant", "content": "def "})
    body: Body = {"model": "any", **_SYSTEM[api](system, case["cache"] == "marked")}
    if api == "chat":
        body["messages"] = [*body["messages"], *asked]
    else:
        body[_turns_of(api)] = asked
    n = LONG if case["length"] == "long" else SHORT
    body["max_output_tokens" if api == "responses" else "max_tokens"] = n
    body |= {"temperature": 1.0, "seed": 7} if case["sampling"] == "seeded" else {"temperature": 0}
    if case["cache"] == "not kept":
        body["cache_prompt"] = False
    if case["stop"] == "text":
        body["stop_sequences" if api == "messages" else "stop"] = [STOP]
    return body | _constraint(api, case["constraint"]) | _reasoning(api, case["reasoning"])


def raw_body(case: Case, chat: Body, prompt: str, marker: str) -> Body:
    """The body of an API of `RAW`: the chat's, with its rendered prompt in place of messages.

    The prompt has `marker` in the place of each image. Tools stay, and are to be refused.
    """
    image = base64.b64encode(png()).decode()
    n_images = prompt.count(marker)
    with_images = {"prompt_string": prompt, "multimodal_data": [image] * n_images}
    body = {key: value for key, value in chat.items() if key != "messages"}
    body["prompt"] = with_images if n_images else prompt
    if case["api"] == "native":
        body["n_predict"] = body.pop("max_tokens")
        if case["constraint"] == "schema":
            body.pop("response_format")
            body["json_schema"] = SCHEMA
    return body


def _text(api: str, text: str) -> Body:
    return {"type": "input_text" if api == "responses" else "text", "text": text}


def _image(api: str) -> list[Body]:
    """The part of a message that is an image."""
    data = base64.b64encode(png()).decode()
    url = "data:image/png;base64," + data
    if api == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return [{"type": "image", "source": source}]
    if api == "responses":
        return [{"type": "input_image", "image_url": url}]
    return [{"type": "image_url", "image_url": {"url": url}}]


def _chat_system(system: str, is_marked: bool) -> Body:
    part = {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}
    return {"messages": [{"role": "system", "content": [part] if is_marked else system}]}


def _messages_system(system: str, is_marked: bool) -> Body:
    part = {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}
    return {"system": [part] if is_marked else system}


_SYSTEM = {
    "chat": _chat_system,
    "responses": lambda system, is_marked: {"instructions": system},
    "messages": _messages_system,
}


def _constraint(api: str, name: str) -> Body:
    if name == "none":
        return {}
    if name == "schema":
        named = {"name": "paint", "schema": SCHEMA}
        return {
            "chat": {"response_format": {"type": "json_schema", "json_schema": named}},
            "responses": {"text": {"format": {"type": "json_schema", **named}}},
            "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        }[api]
    strict = {"strict": True} if name == "strict" else {}
    function = {"name": TOOL, "description": "Paints.", "parameters": SCHEMA, **strict}
    tool = {
        "chat": {"type": "function", "function": function},
        "responses": {"type": "function", **function},
        "messages": {"name": TOOL, "description": "Paints.", "input_schema": SCHEMA, **strict},
    }[api]
    choice: Any = {"auto": "auto", "required": "required", "strict": "required"}.get(name)
    if name == "named":
        choice = {"type": "function", "name": TOOL}
        choice = choice if api == "responses" else {"type": "function", "function": {"name": TOOL}}
    if api == "messages":
        choice = {"auto": {"type": "auto"}, "named": {"type": "tool", "name": TOOL}}.get(
            name, {"type": "any"}
        )
    return {"tools": [tool], "tool_choice": choice}


def _reasoning(api: str, name: str) -> Body:
    switch = {"off": False, "on": True}.get(name)
    if switch is not None:
        if api == "messages":
            on = {"type": "enabled", "budget_tokens": 1024}
            return {"thinking": on if switch else {"type": "disabled"}}
        return {"chat_template_kwargs": {"enable_thinking": switch}}
    if name.startswith("limit"):
        n = int(name.split()[1])
        if api == "messages":
            return {"thinking": {"type": "enabled", "budget_tokens": n}}
        return {"thinking_budget_tokens": n}
    return {}


def _earlier(api: str, case: Case) -> list[Any]:
    """Messages with an image before the question."""
    parts = [*_image(api), _text(api, "What is it?")]
    match case["history"]:
        case "unanswered image":
            return [{"role": "user", "content": parts}]
        case "image in an earlier result":
            answer = {"role": "assistant", "content": "It is red."}
            asked = {"role": "user", "content": "Paint it."}
            return [asked, *_tool_turn(api, with_image=True), answer]
    return []


def _tool_turn(api: str, *, with_image: bool) -> list[Any]:
    """A call and its result."""
    arguments, text = {"colour": "red"}, "It is red."
    parts = [_text(api, text), *(_image(api) if with_image else [])]
    if api == "messages":
        use = {"type": "tool_use", "id": "toolu_1", "name": TOOL, "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": parts}
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    told = json.dumps(arguments)
    content: Any = parts if with_image else text
    if api == "responses":
        return [
            {"type": "function_call", "call_id": "call_1", "name": TOOL, "arguments": told},
            {"type": "function_call_output", "call_id": "call_1", "output": content},
        ]
    call = {"id": "call_1", "type": "function", "function": {"name": TOOL, "arguments": told}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": content},
    ]


def shown(api: str, question: str, *, in_result: bool) -> Body:
    """A request of 8 tokens with an image, in the question or in a tool's result after it."""
    place = {"history": "image in a result"} if in_result else {"media": "image"}
    return body_of(Case.of("request", api=api, length="short", **place), question)


def with_turn(api: str, body: Body, answer: str, question: str) -> Body:
    """The request of the next turn."""
    turn = [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return body | {_turns_of(api): [*body[_turns_of(api)], *turn]}


def _turns_of(api: str) -> str:
    return "input" if api == "responses" else "messages"


def png() -> bytes:
    """A red image of 8 by 8."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    rows = (b"\x00" + b"\xff\x00\x00" * 8) * 8
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )  # fmt: skip


def reply_of(api: str, answer: Body) -> Reply:
    """Read a whole answer."""
    return {
        "chat": _chat_reply, "responses": _responses_reply, "messages": _messages_reply,
        "completions": _completions_reply, "native": _native_reply,
    }[api](answer)  # fmt: skip


def _chat_reply(answer: Body) -> Reply:
    choice, usage = answer["choices"][0], answer["usage"]
    message = choice["message"]
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()
    ]
    return Reply(
        message.get("content") or "", message.get("reasoning_content") or "", calls,
        choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"], [message],
    )  # fmt: skip


def _responses_reply(answer: Body) -> Reply:
    reply = Reply(raw=answer["output"])
    for item in answer["output"]:
        if item["type"] == "message":
            reply.text += "".join(part.get("text", "") for part in item["content"])
        elif item["type"] == "reasoning":
            reply.reasoning += "".join(p["text"] for p in item.get("content") or ())
        elif item["type"] == "function_call":
            reply.calls.append((item["name"], item["arguments"]))
    why = (answer.get("incomplete_details") or {}).get("reason")
    reply.reason = "length" if why == "max_output_tokens" else str(why or "stop")
    reply.n_prompt = answer["usage"]["input_tokens"]
    reply.n_answer = answer["usage"]["output_tokens"]
    return reply


def _messages_reply(answer: Body) -> Reply:
    reply = Reply(raw=[{"role": "assistant", "content": answer["content"]}])
    for block in answer["content"]:
        if block["type"] == "text":
            reply.text += block["text"]
        elif block["type"] == "thinking":
            reply.reasoning += block["thinking"]
        elif block["type"] == "tool_use":
            reply.calls.append((block["name"], json.dumps(block["input"])))
    reply.reason = {"max_tokens": "length"}.get(answer["stop_reason"], answer["stop_reason"])
    usage = answer["usage"]
    reply.n_prompt = usage["input_tokens"] + sum(
        usage.get(name) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens")
    )
    reply.n_answer = usage["output_tokens"]
    return reply


def _completions_reply(answer: Body) -> Reply:
    (choice,), usage = answer["choices"], answer["usage"]
    return Reply(
        choice["text"], reason=choice["finish_reason"], n_prompt=usage["prompt_tokens"],
        n_answer=usage["completion_tokens"],
    )  # fmt: skip


def _native_reply(answer: Body) -> Reply:
    reason = {"limit": "length"}.get(answer["stop_type"], answer["stop_type"])
    timings = answer["timings"]
    n_read = timings["prompt_n"] + timings["cache_n"]
    assert n_read == answer["tokens_evaluated"], f"{n_read} tokens are timed: {answer}"
    return Reply(
        answer["content"], reason=reason, n_prompt=n_read, n_answer=answer["tokens_predicted"],
        raw=answer,
    )  # fmt: skip


def streamed_reply(api: str, events: Sequence[tuple[str, Body]]) -> Reply:
    """Join the events of a stream: (event's name, its data)."""
    return {
        "chat": _chat_stream, "responses": _responses_stream, "messages": _messages_stream,
        "completions": _completions_stream, "native": _native_stream,
    }[api](events)  # fmt: skip


def _chat_stream(events: Sequence[tuple[str, Body]]) -> Reply:
    reply, calls = Reply(), dict[int, list[str]]()
    for _, data in events:
        if usage := data.get("usage"):
            reply.n_prompt, reply.n_answer = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in data.get("choices", ()):
            delta = choice["delta"]
            reply.text += delta.get("content") or ""
            reply.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
            reply.reason = choice.get("finish_reason") or reply.reason
    reply.calls = [(name, arguments) for name, arguments in calls.values()]
    return reply


def _responses_stream(events: Sequence[tuple[str, Body]]) -> Reply:
    ends = ("response.completed", "response.incomplete")
    (last,) = [data["response"] for _, data in events if data.get("type") in ends]
    reply = _responses_reply(last)
    for kind, whole in (("output_text", reply.text), ("reasoning_text", reply.reasoning)):
        name = f"response.{kind}.delta"
        pieces = "".join(d["delta"] for _, d in events if d.get("type") == name)
        assert pieces == whole, f"{name}: {pieces!r} is not {whole!r}"
    return reply


def _messages_stream(events: Sequence[tuple[str, Body]]) -> Reply:
    blocks: dict[int, Body] = {}
    answer: Body = {}
    for _, data in events:
        match data.get("type"):
            case "message_start":
                answer = dict(data["message"])
            case "content_block_start":
                blocks[data["index"]] = dict(data["content_block"])
                blocks[data["index"]]["json"] = ""
            case "content_block_delta":
                block, delta = blocks[data["index"]], data["delta"]
                for name in ("text", "thinking"):
                    if name in delta:
                        block[name] = block.get(name, "") + delta[name]
                block["json"] += delta.get("partial_json", "")
            case "message_delta":
                answer["stop_reason"] = data["delta"]["stop_reason"]
                answer["usage"] = {**answer.get("usage", {}), **data["usage"]}
    for block in blocks.values():
        told = block.pop("json")
        if told and answer["stop_reason"] != "max_tokens":  # a call that was cut is no JSON
            block["input"] = json.loads(told)
    answer["content"] = [blocks[i] for i in sorted(blocks)]
    return _messages_reply(answer)


def _completions_stream(events: Sequence[tuple[str, Body]]) -> Reply:
    reply = Reply()
    for _, data in events:
        if usage := data.get("usage"):
            reply.n_prompt, reply.n_answer = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in data.get("choices", ()):
            reply.text += choice["text"]
            reply.reason = choice.get("finish_reason") or reply.reason
    return reply


def _native_stream(events: Sequence[tuple[str, Body]]) -> Reply:
    *_, (_, last) = events
    text = "".join(data["content"] for _, data in events)
    return _native_reply({**last, "content": text})
