"""Tools, reasoning and several answers over HTTP: recorded texts, by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from fake_generator import FakeFactory
from openai.types.chat import ChatCompletionToolParam
from running import Running, StartServer, http

from specoffload.chat.conversation import ChatSettings, ReasoningOptions

# Marks by which a template is recognised as one of Hermes' format and reasoning.
TEMPLATE = (
    "{# <tool_call> <think> #}{% set nl = '\\n' %}"
    "{% if tools %}{{ tools | tojson }}{{ nl }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ nl }}"
    "{% endfor %}"
    "{% if enable_thinking is defined %}thinking {{ enable_thinking }}{{ nl }}{% endif %}"
    "{% if slow %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{% if large %}{{ 'x' * 3000000000 }}{% endif %}"
)
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = (
    "<think>\nHm.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server() -> Any:
    running = Running(FakeFactory(chat_template=TEMPLATE, n_ctx=4096))
    running.wait_until_healthy()
    yield running
    running.stop()


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": f"[say]{text}[/say]"}]


def test_recorded_calls_are_told_whole(server: Running) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(model="any", messages=said(CALLS), tools=[TOOL])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.model_extra == {"reasoning_content": "Hm."}
    assert choice.message.tool_calls is not None
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert found == [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Rom"}')]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    n_reasoning = answer.usage.completion_tokens_details.reasoning_tokens
    assert n_reasoning is not None
    assert 0 < n_reasoning < answer.usage.completion_tokens


def test_streamed_calls_join_to_the_same(server: Running) -> None:
    with server.client() as client:
        stream = client.chat.completions.create(
            model="any", messages=said(CALLS), tools=[TOOL], stream=True
        )
        chunks = list(stream)
    content = "".join(c.choices[0].delta.content or "" for c in chunks)
    thought = "".join(
        (c.choices[0].delta.model_extra or {}).get("reasoning_content", "") for c in chunks
    )
    assert (content, thought) == ("I look.", "Hm.")
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            found = calls.setdefault(call.index, {"arguments": ""})
            assert call.function is not None
            if call.id:
                assert call.function.name == "get_weather"
                assert "id" not in found
                found["id"] = call.id
            found["arguments"] += call.function.arguments or ""
    cities = [json.loads(call["arguments"])["city"] for call in calls.values()]
    assert cities == ["Paris", "Rom"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert sum(bool(c.choices[0].delta.tool_calls) for c in chunks) > 10  # piece by piece


def test_without_parallel_calls_the_first_is_told(server: Running) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model="any", messages=said(CALLS), tools=[TOOL], parallel_tool_calls=False
        )
    assert len(answer.choices[0].message.tool_calls or ()) == 1


def test_without_tools_a_call_is_text_and_reasoning_can_be_left_in_it(server: Running) -> None:
    with server.client() as client:
        plain = client.chat.completions.create(model="any", messages=said(CALLS))
        raw = client.chat.completions.create(
            model="any", messages=said(CALLS), extra_body={"reasoning_format": "none"}
        )
    assert plain.choices[0].finish_reason == "stop"
    assert (plain.choices[0].message.content or "").startswith("I look.\n<tool_call>")
    assert raw.choices[0].message.content == CALLS


def test_a_whole_turn_with_calls_and_results_reaches_the_template(server: Running) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, TEXT]},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "Rain"},
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    prompt = http.post(server.url + "/apply-template", json=body).json()["prompt"]
    assert prompt == (
        "system: Be brief\nuser: Weather?\nassistant: {}\ntool: Rain\nthinking False\n"
    )


TEXT = {"type": "text", "text": "brief"}


def test_the_effort_none_turns_reasoning_off_and_an_answer_is_continued(server: Running) -> None:
    body = {"messages": said("x"), "reasoning_effort": "none"}
    prompt = http.post(server.url + "/apply-template", json=body).json()["prompt"]
    assert prompt.endswith("thinking False\n")
    begun = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    prompt = http.post(server.url + "/apply-template", json=begun).json()["prompt"]
    assert prompt == "user: a\nassistant: b"
    begun["continue_final_message"] = False  # type: ignore[assignment]
    prompt = http.post(server.url + "/apply-template", json=begun).json()["prompt"]
    assert prompt == "user: a\nassistant: b\n"


ASKED = {"role": "user", "content": "a"}
BEGUN = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("messages", "fields", "words"),
    [
        ([ASKED, BEGUN], {"add_generation_prompt": True}, "exclude each other"),
        ([ASKED], {}, "the last message is of role user"),
        ([ASKED, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]}], {}, "the last message has tool_calls"),
        ([ASKED, BEGUN], {"continue_final_message": "reasoning_content"}, "has content after"),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_continued_is_a_400(
    server: Running, messages: list[Any], fields: dict[str, Any], words: str
) -> None:
    body = {"messages": messages, "continue_final_message": True, **fields}
    answer = http.post(server.url + "/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_the_fields_of_vllm_and_llama_server_continue_the_last_message(server: Running) -> None:
    def prompt(last: dict[str, Any], **fields: Any) -> str:
        body = {"messages": [ASKED, {"role": "assistant", **last}], **fields}
        answer = http.post(server.url + "/apply-template", json=body)
        found: str = answer.json()["prompt"]
        return found

    both = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt({"content": "b"}, **both) == "user: a\nassistant: b"
    assert prompt({"content": "b "}, continue_final_message="content").endswith("b ")
    thought = {"content": None, "reasoning_content": "Hm"}
    assert prompt(thought, **both).endswith("<think>\nHm")
    asked = prompt(thought, continue_final_message="content")
    assert asked.endswith("<think>\nHm\n</think>\n\n")


def test_several_answers_are_told_by_their_index(server: Running) -> None:
    with server.client() as client:
        whole = client.chat.completions.create(model="any", messages=said(CALLS), tools=[TOOL], n=3)
        stream = client.chat.completions.create(
            model="any",
            messages=said(CALLS),
            tools=[TOOL],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert all(choice.message.content == "I look." for choice in whole.choices)
    ends = [c.choices[0].index for c in chunks if c.choices and c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * len(CALLS)


def test_a_template_that_does_not_end_is_a_400_that_names_it_and_the_next_is_served(
    server: Running,
) -> None:
    with server.client() as client:
        for kwargs, words in (({"slow": True}, "takes over"), ({"large": True}, "memory")):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(
                    model="any", messages=said("x"), extra_body={"chat_template_kwargs": kwargs}
                )
            message = caught.value.body["message"]  # type: ignore[index]
            assert message.startswith("chat template of the model file")
            assert words.lower() in message.lower()
        answer = client.chat.completions.create(model="any", messages=said("still here"))
    assert answer.choices[0].message.content == "still here"


def test_settings_of_the_server_are_those_of_requests_that_do_not_say(
    start_server: StartServer,
) -> None:
    settings = ChatSettings(
        TEMPLATE, "mine", {"enable_thinking": True}, ReasoningOptions("none"), continues=False
    )
    server = start_server(FakeFactory(), chat=settings)
    body = {"messages": said(CALLS)}
    prompt = http.post(server.url + "/apply-template", json=body).json()["prompt"]
    assert prompt.endswith("thinking True\n")
    with server.client() as client:
        answer = client.chat.completions.create(model="any", messages=said(CALLS))
    assert answer.choices[0].message.content == CALLS


def test_a_stop_sequence_limits_the_answer_and_not_the_reasoning(server: Running) -> None:
    text = "<think>\nNot END yet.\n</think>\n\nIt is so. END More."
    with server.client() as client:
        answer = client.chat.completions.create(model="any", messages=said(text), stop=["END"])
        chunks = client.chat.completions.create(
            model="any", messages=said(text), stop=["END"], stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    message = answer.choices[0].message
    assert message.content is not None
    assert message.content.strip() == streamed.strip() == "It is so."
    assert message.model_extra == {"reasoning_content": "Not END yet."}
    assert answer.choices[0].finish_reason == "stop"
    body = {"messages": said(text), "max_tokens": 99, "stop_sequences": ["END"]}
    turn = http.post(server.url + "/v1/messages", json=body).json()
    assert (turn["stop_reason"], turn["stop_sequence"]) == ("stop_sequence", "END")
    assert [block["type"] for block in turn["content"]] == ["thinking", "text"]
    left = {**body, "stop": ["END"], "reasoning_format": "none"}
    whole = http.post(server.url + "/v1/chat/completions", json=left).json()
    assert whole["choices"][0]["message"]["content"] == "<think>\nNot "


def test_what_is_left_out_of_a_tool_is_named_and_logged_once(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = {"type": "string", "pattern": "^(?!\\.)[a-z]+$"}
    parameters = {"type": "object", "properties": {"to": pattern}}
    function = {"name": "mail", "parameters": parameters}
    tool = {"type": "function", "function": function}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "mail"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}  # so that a grammar is needed
    body = {"messages": said("Fine."), "tools": [tool, TOOL], "tool_choice": choice}
    with caplog.at_level("WARNING", logger="specoffload.server"):
        for _ in range(2):
            answer = http.post(server.url + "/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            names = answer.headers["x-ignored-parameters"]
            assert names == "tools.mail#/properties/to/pattern"
    logged = [record.message for record in caplog.records if "'mail'" in record.message]
    assert len(logged) == 1
    assert "look-ahead and look-behind cannot be followed" in logged[0]
    tool["function"] = {**function, "strict": True}
    answer = http.post(server.url + "/v1/chat/completions", json=body)
    assert answer.status_code == 400
    words = "'mail' is strict, and #/properties/to/pattern of its parameters cannot be enforced"
    assert words in answer.json()["error"]["message"]


def test_every_api_follows_a_schema(server: Running) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    user = [{"role": "user", "content": "[options]"}]
    messages = {"messages": user, "max_tokens": 2000}
    for path, body in (
        ("/v1/messages", {**messages, "output_config": {"format": form}}),
        ("/v1/messages", {**messages, "output_format": form}),
        ("/v1/chat/completions", {**messages, "response_format": form}),
        ("/v1/responses", {"input": "[options]", "text": {"format": {**form, "name": "n"}}}),
    ):
        answer = http.post(server.url + path, json=body)
        assert answer.status_code == 200, answer.text
        assert "grammar=" in answer.text
        assert "%json" in answer.text
