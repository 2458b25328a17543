"""Published templates render as in transformers, and limits stop hostile templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from published import ASK, CONVERSATIONS, NAMES, WEATHER, chat_format, source

from offload.errors import BadRequest
from specoffload.chat.conversation import Conversation, Named, ReasoningOptions, Tool
from specoffload.chat.families import family_of, reasoning_of
from specoffload.chat.format import CHATML, ChatFormat
from specoffload.chat.messages import template_messages
from specoffload.chat.probing import needs_of
from specoffload.chat.templates import render

FAMILIES = {
    "ByteDance-Seed-OSS": "seed-oss",
    "GLM-4.6": "glm-4.5",
    "GLM-4.7-Flash": "glm-4.5",
    "HuggingFaceTB-SmolLM3-3B": "generic",
    "Kimi-K2-Instruct": "kimi-k2",
    "Kimi-K2-Thinking": "kimi-k2",
    "MiniMax-M1": "minimax-m1",
    "MiniMax-M2": "minimax-m2",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral-v11",
    "NVIDIA-Nemotron-Nano-v2": "nemotron-v2",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5-4B": "qwen3-coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-v3.2",
    "google-gemma-2-2b-it": "generic",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "llama-cpp-deepseek-r1": "deepseek-r1",
    "meta-llama-Llama-3.1-8B-Instruct": "llama-3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama-3",
    "microsoft-Phi-3.5-mini-instruct": "generic",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral-v11",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "openai-gpt-oss-120b": "gpt-oss",
}

# Templates that render here and not in transformers, which forbids changing lists, cannot write the
# result of the filter `map` as JSON, and drops content that is None.
ONLY_HERE = {
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "called"),
    ("Kimi-K2-Instruct", "called"),
    ("Kimi-K2-Thinking", "called"),
    ("llama-cpp-deepseek-r1", "tools"),
    ("llama-cpp-deepseek-r1", "called"),
}


# Neighbours that a template refuses, or whose text it drops.
ALTERNATING = {("user", "user"), ("answer", "answer"), ("start", "answer")}
MISTRAL = ALTERNATING | {("answer", "call"), ("result", "user"), ("start", "call")}
REFUSED = {
    "Mistral-Small-3.2-24B-Instruct-2506": MISTRAL,
    "NVIDIA-Nemotron-Nano-v2": {("call", "end")},
    "google-gemma-2-2b-it": ALTERNATING,
    "meta-llama-Llama-3.1-8B-Instruct": {("start", "answer"), ("start", "call")},
    "meta-llama-Llama-3.3-70B-Instruct": {("start", "answer"), ("start", "call")},
    "mistralai-Ministral-3-14B-Reasoning-2512": MISTRAL,
    "mistralai-Mistral-Nemo-Instruct-2407": MISTRAL,
}
MINISTRAL = "mistralai-Ministral-3-14B-Reasoning-2512"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer of transformers. Only its chat template is used."""
    import tokenizers
    import transformers

    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.extra("transformers", "tokenizers")
@pytest.mark.parametrize("words", CONVERSATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_published_template_renders_as_in_transformers(
    name: str, words: str, tokenizer: Any
) -> None:
    conversation = CONVERSATIONS[words]
    text = source(name)
    needs = needs_of(name, text, bos="<s>", eos="</s>")
    messages = template_messages(conversation, needs, family_of(text).layout)
    reasoning = conversation.reasoning
    options: dict[str, Any] = {}
    if reasoning.enabled is not None:
        options = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
        options["thinking_budget"] = 0  # Seed-OSS's switch
    tools = [WEATHER.as_openai()] if conversation.tools and needs.takes_tools else None
    try:
        expected = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=text,
            add_generation_prompt=True,
            tokenize=False,
            **options,
        )
    except Exception:
        if (name, words) in ONLY_HERE:
            assert chat_format(name).prepare(conversation).text
        else:
            with pytest.raises(BadRequest):
                chat_format(name).prepare(conversation)
        return
    assert (name, words) not in ONLY_HERE
    assert chat_format(name).prepare(conversation).text == expected


@pytest.mark.extra("transformers", "tokenizers")
@pytest.mark.parametrize("name", NAMES)
def test_a_begun_answer_is_rendered_as_in_transformers(name: str, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So it is"}]
    tools = (WEATHER,) if "tool_use" in name else ()
    asked = Conversation(tuple(messages), tools, continues="auto")
    text = chat_format(name).prepare(asked).text
    expected = tokenizer.apply_chat_template(
        messages,
        tools=[tool.as_openai() for tool in tools] or None,
        chat_template=source(name),
        continue_final_message=True,
        tokenize=False,
    )
    if name == "NVIDIA-Nemotron-Nano-v2":  # its template leaves the reasoning open
        expected = expected.replace("<think>\n", "<think>\n\n</think>\n\n")
    assert text == expected


def test_there_are_twenty_published_templates_of_known_families() -> None:
    assert len(NAMES) >= 20
    assert {name: family_of(source(name)).name for name in NAMES} == FAMILIES


@pytest.mark.parametrize("name", NAMES)
def test_every_published_template_is_given_everything_in_words_that_it_has(name: str) -> None:
    """Prompts contain everything that a client sends, even if the template does not support it."""
    for words, conversation in CONVERSATIONS.items():
        if name.startswith("NousResearch") and not conversation.tools:
            continue  # this template is named tool_use: only for conversations with tools
        text = chat_format(name).prepare(conversation).text
        for message in conversation.messages:
            assert str(message["content"] or "") in text, words
        if conversation.tools:
            assert "get_weather" in text, words
    called = chat_format(name).prepare(CONVERSATIONS["called"]).text
    assert "Zürich <b>" in called.replace("\\u003c", "<").replace("\\u003e", ">")


def test_arguments_are_written_as_json_once() -> None:
    for name in NAMES:
        text = chat_format(name).prepare(CONVERSATIONS["called"]).text
        assert '\\"city\\"' not in text, name
        assert "'city'" not in text, name


def test_a_model_that_only_continues_gets_the_text_of_all_messages() -> None:
    form = ChatFormat.continuing()

    def text(*said: tuple[str, str]) -> str:
        messages = tuple({"role": role, "content": content} for role, content in said)
        prompt = form.prepare(Conversation(messages))
        assert not prompt.stops
        return prompt.text

    asked, body = ("user", "def f(x):"), ("assistant", "\n    return x")
    assert text(asked) == "def f(x):"
    assert text(asked, body, ("user", "def g(x):")) == "def f(x):\n    return x\ndef g(x):"
    assert text(asked, ("assistant", ""), asked) == "def f(x):\ndef f(x):"
    assert text(("user", "import os\n"), asked) == "import os\ndef f(x):"


def test_a_file_without_a_template_is_chatml_and_tool_use_is_taken_with_tools() -> None:
    ours = ChatFormat.of(None)
    prompt = ours.prepare(Conversation(({"role": "user", "content": "Hi"},)))
    assert prompt.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    named = ChatFormat({"default": CHATML, "tool_use": source("Qwen3-Coder")})
    assert named.prepare(CONVERSATIONS["plain"]).form.family.name == "generic"
    assert named.prepare(CONVERSATIONS["tools"]).form.family.name == "qwen3-coder"


def test_jinja_as_templates_expect_it() -> None:
    source = (
        "{%- for i in range(9) -%}{%- if i == 2 -%}{%- break -%}{%- endif -%}{{ i }}{%- endfor -%}"
        "{% generation %}g{% endgeneration %}"
        "{{ {'a': '<é>'} | tojson(ensure_ascii=False) }}{{ {'b': 1} | tojson(indent=1) }}"
        "{{ strftime_now('%Y') | length }}"
    )
    assert render("t", source, {}) == '01g{"a": "<é>"}{\n "b": 1\n}4'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1/0 }}", "division"),
        ("{{ raise_exception('no tools here') }}", "refuses the messages: no tools here"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "not a Jinja template"),
        ("{{ messages[0].content.foo.bar }}", "no attribute"),
        ("{{ 'x' + 1 }}", "TypeError"),
        ("{{ {1: messages}.keys() | tojson }}", "written as JSON"),
    ],
)
def test_a_failing_template_is_one_sentence_that_names_it(source: str, words: str) -> None:
    with pytest.raises(BadRequest, match=f"(?s)chat template of the test.*{words}"):
        ChatFormat({"default": source}, name="of the test").prepare(CONVERSATIONS["plain"])


def test_a_template_sees_nothing_of_the_program() -> None:
    for name in ("raise_exception", "strftime_now", "messages.append", "cycler"):
        for attribute in ("__globals__", "__self__", "__init__", "__code__"):
            assert render("t", f"{{{{ {name}.{attribute} }}}}", {"messages": []}) == ""


def test_the_reasoning_that_the_prompt_opens_is_read_as_such() -> None:
    for name, thinking in (("deepseek-ai-DeepSeek-V3.1", True), ("Qwen-Qwen3-0.6B", False)):
        asked = Conversation((ASK,), reasoning=ReasoningOptions(enabled=True))
        prompt = chat_format(name).prepare(asked)
        assert prompt.form.reasoning == reasoning_of(source(name)) == ("<think>", "</think>")
        assert prompt.form.thinking == thinking
    closed = chat_format("GLM-4.6").prepare(CONVERSATIONS["reasoned"])
    assert not closed.form.thinking


def test_conversations_that_cannot_be_are_refused() -> None:
    with pytest.raises(BadRequest, match="messages is empty"):
        Conversation(())
    with pytest.raises(BadRequest, match="two of them are called 'get_weather'"):
        Conversation((ASK,), (WEATHER, WEATHER))
    with pytest.raises(BadRequest, match="no tool is called 'f'"):
        Conversation((ASK,), (WEATHER,), Named("f"))
    with pytest.raises(BadRequest, match="there are no tools"):
        Conversation((ASK,), tool_choice="required")
    with pytest.raises(BadRequest, match="tool name"):
        Tool('a"b')


def test_tools_that_may_not_be_called_are_not_told() -> None:
    for name in NAMES:
        silent = Conversation((ASK,), (WEATHER,), "none")
        if "tool_use" in name:
            continue
        prompt = chat_format(name).prepare(silent)
        assert "get_weather" not in prompt.text
        assert not prompt.form.schemas


def test_kwargs_and_efforts_reach_the_template() -> None:
    source = "{{ reasoning_effort }} {{ enable_thinking }} {{ mine | tojson }}"
    asked = Conversation(
        (ASK,),
        reasoning=ReasoningOptions(enabled=False, effort="high"),
        template_kwargs={"mine": [1, json.loads("null")]},
    )
    assert ChatFormat.of(source).prepare(asked).text == "high False [1, null]"


@pytest.mark.parametrize("name", NAMES)
def test_the_limits_of_a_published_template_are_found(name: str) -> None:
    needs = needs_of(name, source(name), bos="<s>", eos="</s>")
    assert needs.limits.refused == REFUSED.get(name, set())
    assert needs.reasoning_as_part == (name == MINISTRAL), "only its template reads such parts"
    # Ministral's template refuses an answer without any content.
    assert needs.limits.filler == (" " if name == MINISTRAL else "")
    assert needs.limits.empty_answer == (name != MINISTRAL)


def test_a_template_that_refuses_results_still_takes_calls() -> None:
    """The probe renders a call with its result first, and then the call alone."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no results') }}"
        "{% endif %}{{ m.content }}{% for c in m.tool_calls or () %}{{ c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    needs = needs_of("t", template, bos="", eos="")
    assert needs.takes_calls
    assert not needs.takes_results
