"""Every form in which clients switch thinking acts on each family's prompt, or is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import NAMES, WEATHER, chat_format, source

from offload.errors import BadRequest
from specoffload.chat.conversation import ChatSettings, ReasoningOptions
from specoffload.chat.families import family_of, reasoning_of
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.chat.thinking import ThinkingWish, thinking_wish
from specoffload.generation.generation import GenerateOptions
from specoffload.server.api import message_input, response_input
from specoffload.server.api.body import checked, ignored_names
from specoffload.server.api.parameters import conversation_of, generate_options, wish_of
from specoffload.server.api.requests import ChatRequest, ConversationRequest

OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"enable_thinking": "false"},
    {"enable_thinking": 0},
    {"think": False},
    {"think": "none"},
    {"think": "False"},
    {"thinking": False},
    {"thinking": "disabled"},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "disabled", "budget_tokens": 0}},
    {"reasoning": False},
    {"reasoning": "off"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
    {"reasoning_effort": "none"},
    {"reasoning_effort": {"effort": "none", "summary": "auto"}},
    {"output_config": {"effort": "none"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": "false"}},
    {"chat_template_kwargs": {"enable_thinking": 0}},
    {"chat_template_kwargs": {"enable_thinking": "False"}},
    {"chat_template_kwargs": {"thinking": False}},
    {"chat_template_kwargs": {"reasoning_effort": "none"}},
]
ON: list[dict[str, Any]] = [
    {"enable_thinking": True},
    {"enable_thinking": "true"},
    {"think": 1},
    {"think": True},
    {"thinking": True},
    {"thinking": "enabled"},
    {"thinking": {"type": "enabled", "budget_tokens": 99}},
    {"thinking": {"type": "adaptive"}},
    {"reasoning": {"enabled": True}},
    {"reasoning": "on"},
    {"chat_template_kwargs": {"enable_thinking": "true"}},
    {"chat_template_kwargs": {"thinking": True}},
]
NO_WISH: list[dict[str, Any]] = [
    {},
    {"think": None},
    {"thinking": {}},
    {"thinking": {"type": "auto"}},
    {"reasoning": {"effort": "auto", "summary": "auto"}},
    {"reasoning_effort": "default"},
    {"reasoning_effort": ""},
    {"include_reasoning": True},
]
# Templates without a switch, of models that think.
FIXED = {
    "Kimi-K2-Thinking",
    "MiniMax-M2",
    "NVIDIA-Nemotron-Nano-v2",
    "llama-cpp-deepseek-r1",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "openai-gpt-oss-120b",
}


def request(fields: dict[str, Any], api: str = "chat", *, tools: bool = False) -> ChatRequest:
    """A request with these fields, as a chat request. `tools`: with one tool."""
    asked = {"role": "user", "content": "Why?"}
    body: dict[str, Any] = {"messages": [asked], **fields}
    if tools:
        body["tools"] = [WEATHER.as_openai()]
    if api == "messages":
        whole = checked({**body, "max_tokens": 9}, message_input.MessagesRequest)
        body = message_input.as_chat(whole)[0]
    elif api == "responses":
        body = {"input": [asked], **fields}
        body = response_input.as_chat(checked(body, response_input.ResponsesRequest))[0]
    return checked(body, ChatRequest)


def prepared(name: str, fields: dict[str, Any]) -> ChatPrompt:
    asked = request(fields, tools="tool_use" in name)
    return chat_format(name).prepare(conversation_of(asked, ChatSettings()))


def reasons(name: str) -> bool:
    text = source(name)
    return reasoning_of(text) is not None or family_of(text).layout.is_harmony


@pytest.mark.parametrize("name", NAMES)
def test_every_form_acts_on_every_template_or_is_named(name: str) -> None:
    on, off = prepared(name, {"enable_thinking": True}), prepared(name, {"enable_thinking": False})
    is_fixed = on.text == off.text
    assert is_fixed == (name in FIXED or not reasons(name))
    for fields in OFF:
        prompt = prepared(name, fields)
        assert prompt.text == off.text, fields
        assert ("enabled" in prompt.unheeded) == (is_fixed and reasons(name)), fields
        assert wish_of(request(fields)).switches, "the form is there to be named"
    for fields in ON:
        prompt = prepared(name, fields)
        assert prompt.text == on.text, fields
        assert ("enabled" in prompt.unheeded) == (not reasons(name)), fields
    for fields in NO_WISH:
        assert prepared(name, fields).text == prepared(name, {}).text, fields


@pytest.mark.parametrize("name", NAMES)
def test_an_effort_reaches_the_template_or_is_named(name: str) -> None:
    for fields in (
        {"reasoning_effort": "high"},
        {"reasoning": {"effort": "HIGH"}},
        {"output_config": {"effort": "high"}},
        {"chat_template_kwargs": {"reasoning_effort": "high"}},
    ):
        prompt = prepared(name, fields)
        is_gpt_oss = name == "openai-gpt-oss-120b"
        assert ("Reasoning: high" in prompt.text) == is_gpt_oss
        assert ("effort" in prompt.unheeded) == (not is_gpt_oss)
    wish = wish_of(request({"think": "low"}))
    assert (wish.enabled, wish.effort) == (True, "low"), "Ollama's levels turn thinking on"


@pytest.mark.parametrize("api", ["messages", "responses"])
@pytest.mark.parametrize("fields", [*OFF, *ON])
def test_the_other_apis_take_every_form_too(api: str, fields: dict[str, Any]) -> None:
    assert wish_of(request(fields, api)) == wish_of(request(fields))


@pytest.mark.parametrize("off", OFF)
def test_forms_that_contradict_each_other_are_one_sentence(off: dict[str, Any]) -> None:
    for on in ON:
        if on.keys() & off.keys():
            continue
        both = {**on, **off}
        if on == {"thinking": {"type": "adaptive"}}:  # leaves it to the model
            assert wish_of(request(both)).enabled is False
            continue
        with pytest.raises(BadRequest, match="turns thinking on, and .* turns it off: send one"):
            conversation_of(request(both), ChatSettings())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"enable_thinking": "maybe"}, "enable_thinking: 'maybe' is not true or false"),
        ({"enable_thinking": 2}, "enable_thinking: '2' is not true or false"),
        ({"think": [1]}, r"think: '\[1\]' is not true or false"),
        ({"thinking": {"type": "some"}}, "thinking.type: 'some' is not one of enabled, disabled"),
        ({"thinking": {"budget_tokens": -2}}, "thinking.budget_tokens: -2 is not a number"),
        ({"thinking": {"budget_tokens": 1.5}}, "thinking.budget_tokens: 1.5 is not a number"),
        ({"reasoning_effort": 3}, "reasoning_effort: '3' is not the name of an effort"),
        (
            {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
            "send one effort of thinking",
        ),
        (
            {"thinking": {"budget_tokens": 5}, "reasoning": {"max_tokens": 6}},
            "send one number of tokens of thinking",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}},
            "chat_template_kwargs.enable_thinking turns thinking on",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        conversation_of(request(fields), ChatSettings())


def test_a_budget_in_any_form_limits_the_reasoning() -> None:
    for fields in (
        {"thinking_budget_tokens": 7},
        {"thinking_budget": 7},
        {"thinking_token_budget": 7},
        {"reasoning_budget": 7},
        {"thinking": {"type": "enabled", "budget_tokens": 7.0}},
        {"reasoning": {"max_tokens": 7}},
        {"thinking_budget": 7, "thinking": {"budget_tokens": 7}},
    ):
        options, _ = generate_options(request(fields), GenerateOptions())
        assert options.reasoning_budget == 7, fields
    both = request({"thinking_budget": 7, "thinking": {"budget_tokens": 8}})
    with pytest.raises(BadRequest, match="thinking_budget_tokens is 7, and another field sets 8"):
        generate_options(both, GenerateOptions())


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"reasoning": {"exclude": True}}, "hidden"),
        ({"include_reasoning": False}, "hidden"),
        ({"include_reasoning": False, "reasoning_format": "raw"}, "hidden"),
        ({"reasoning_format": "hidden"}, "hidden"),
        ({"reasoning_format": "parsed"}, "deepseek"),
        ({"reasoning_format": "raw"}, "none"),
        ({"reasoning": {"exclude": False}}, "auto"),
        ({"include_reasoning": True}, "auto"),
    ],
)
def test_groq_and_openrouter_say_where_the_reasoning_goes(fields: Any, wanted: str) -> None:
    assert conversation_of(request(fields), ChatSettings()).reasoning.format == wanted


@pytest.mark.parametrize("kind", ["off", "DISABLED", "Disabled", False, "none"])
def test_the_type_of_thinking_has_all_words_that_turn_it_off(kind: Any) -> None:
    assert wish_of(request({"thinking": {"type": kind}})).enabled is False


def test_fields_of_a_form_without_effect_are_named() -> None:
    fields = {"reasoning": {"exclude": True, "effort": "low", "summary": "auto"}}
    assert wish_of(request(fields)).ignored == ()
    assert wish_of(request({"thinking": {"type": "enabled", "keep": "all"}})).ignored == (
        "thinking.keep",
    )
    # A switch of a name that nobody knows is not "off anyway".
    unknown = request({"enable_reasoning": False, "no_think": 0, "verbose_mode": False})
    assert set(ignored_names(unknown)) == {"enable_reasoning", "no_think"}


def test_template_variables_that_the_template_does_not_read_are_found() -> None:
    kwargs = {"thinking_mode": "off", "preserve": True, "enable_thinking": False}
    prompt = prepared("Qwen-Qwen3-0.6B", {"chat_template_kwargs": kwargs})
    assert prompt.unused == ("thinking_mode", "preserve")
    kwargs = {"thinking_budget": 512, "x": 1}
    assert prepared("ByteDance-Seed-OSS", {"chat_template_kwargs": kwargs}).unused == ("x",)


def test_an_effort_may_turn_thinking_off_in_a_template_that_knows_none() -> None:
    template = (
        "{{ messages[0].content }}<think>"
        "{% if reasoning_effort is defined and reasoning_effort == 'none' %}</think>{% endif %}"
    )
    form = ChatFormat.of(template)
    for fields in OFF:
        prompt = form.prepare(conversation_of(request(fields), ChatSettings()))
        assert prompt.text == "Why?<think></think>"
        assert prompt.unheeded == frozenset()


def test_a_request_replaces_what_the_server_is_started_with() -> None:
    settings = ChatSettings(
        template_kwargs={"enable_thinking": "false", "mine": 1},
        reasoning=ReasoningOptions(enabled=True, effort="none"),
    )
    plain = conversation_of(request({}), settings)
    assert plain.reasoning == ReasoningOptions(enabled=False)
    assert plain.template_kwargs == {"mine": 1}
    for fields in ON:
        assert conversation_of(request(fields), settings).reasoning.enabled is True, fields
    none = ChatSettings(reasoning=ReasoningOptions(effort="none"))
    assert conversation_of(request({}), none).reasoning == ReasoningOptions(enabled=False)
    with pytest.raises(BadRequest, match="--chat-template-kwargs.enable_thinking: 'x' is not true"):
        ChatSettings(template_kwargs={"enable_thinking": "x"})


_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "on", "none", "high", "auto", "Adaptive", "disabled", "?"])
)
_FORMS = st.sampled_from(
    ["enable_thinking", "think", "thinking", "reasoning", "reasoning_effort", "include_reasoning"]
)
_KEYS = st.sampled_from(["type", "enabled", "effort", "budget_tokens", "max_tokens", "other"])


@given(st.dictionaries(_FORMS, _VALUES | st.dictionaries(_KEYS, _VALUES, max_size=3)))
def test_any_forms_are_one_wish_or_one_sentence(forms: dict[str, Any]) -> None:
    wish, fault = None, ""
    try:
        wish = thinking_wish(forms)
    except BadRequest as e:
        fault = str(e)
    if wish is None:
        assert fault
        assert "\n" not in fault
        return
    said = {place.partition(".")[0] for place in (*wish.switches, *wish.efforts, *wish.ignored)}
    assert said <= forms.keys()
    assert (wish.enabled is False) <= bool(wish.switches), "off is always said by a form"
    assert forms or wish == ThinkingWish()
    asked = checked({"messages": [{"role": "user", "content": "x"}], **forms}, ConversationRequest)
    assert conversation_of(asked, ChatSettings()).reasoning.enabled == wish.enabled
