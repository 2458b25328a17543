"""llama.cpp's built-in chat templates as Jinja, by the names of --chat-template. Pure.

llama.cpp has them as code (llama_chat_apply_template), which the processes that render templates do
not load. A test compares each with the pinned library's.
"""

from __future__ import annotations

import json
import re

# In a form, {text} is the message's text, {trimmed} is it without white space around it, and {role}
# is the message's role.
_EXPRESSIONS = {
    "{text}": "message.content",
    "{trimmed}": "message.content | trim(' \\t\\n\\r\\x0b\\x0c')",
    "{role}": "message.role",
}
_ROLES = ("system", "user", "assistant", "tool")


def _written(form: str) -> str:
    """A form as a Jinja expression that writes it."""
    parts = filter(None, re.split(r"(\{text\}|\{trimmed\}|\{role\})", form))
    return "{{ " + " ~ ".join(f"({_expression(part)})" for part in parts) + " }}" if form else ""


def _expression(part: str) -> str:
    return _EXPRESSIONS.get(part) or json.dumps(part, ensure_ascii=False)


def _looped(body: str, answer: str, begin: str = "") -> str:
    end = f"{{% if add_generation_prompt %}}{_written(answer)}{{% endif %}}" if answer else ""
    return f"{begin}{{% for message in messages %}}{body}{{% endfor %}}{end}"


def _by_role(*forms: str) -> str:
    """A form for each of _ROLES; "" writes nothing."""
    cases = zip(_ROLES, forms, strict=False)
    tests = "".join(f"{{% elif message.role == '{role}' %}}{_written(f)}" for role, f in cases if f)
    return "{% if false %}" + tests + "{% endif %}"


def _plain(
    system: str, user: str, assistant: str, answer: str, *, tool: str = "", begin: str = ""
) -> str:
    return _looped(_by_role(system, user, assistant, tool), answer, _written(begin))


def _same(form: str, answer: str, begin: str = "") -> str:
    """One form for all roles."""
    return _looped(_written(form), answer, _written(begin))


def _system_first(system: str, user: str, assistant: str, answer: str, begin: str) -> str:
    """A system message counts only as the first one."""
    first = f"{{% if loop.first and message.role == 'system' %}}{_written(system)}{{% endif %}}"
    return _looped(first + _by_role("", user, assistant), answer, _written(begin))


def _without_system(begin: str, template: str) -> str:
    """`begin` before a conversation that has no system message of its own."""
    return f"{{% if messages[0].role != 'system' %}}{_written(begin)}{{% endif %}}{template}"


def _turns(first: str, again: str, system: str, user: str, assistant: str) -> str:
    """`first` opens the first turn and `again` the others; an answer closes a turn."""
    opening = f"{{% if not turn.open %}}{_written(again)}{{% set turn.open = true %}}{{% endif %}}"
    closing = "{% if message.role == 'assistant' %}{% set turn.open = false %}{% endif %}"
    begin = f"{{% set turn = namespace(open=true) %}}{_written(first)}"
    return _looped(opening + _by_role(system, user, assistant) + closing, "", begin)


def _merged(system: str, opens: str, user: str, assistant: str, answer: str) -> str:
    """System messages stand in the next user message, after `opens` and before an empty line."""
    held = f"{{% set held.text = held.text ~ ({_EXPRESSIONS[system]}) %}}"
    release = "{% if held.text %}{{ held.text ~ '\\n\\n' }}{% set held.text = '' %}{% endif %}"
    asked = f"{_written(opens)}{release}{_written(user)}"
    body = (
        f"{{% if message.role == 'system' %}}{held}"
        f"{{% elif message.role == 'assistant' %}}{_written(assistant)}"
        f"{{% elif message.role == 'user' %}}{asked}{{% endif %}}"
    )
    return _looped(body, answer, "{% set held = namespace(text='') %}")


def _vicuna(system: str) -> str:
    return _plain(system, "USER: {text}\n", "ASSISTANT: {text}</s>\n", "ASSISTANT:")


def _bailing(end: str, answer: str) -> str:
    names = ("SYSTEM", "HUMAN", "ASSISTANT", "TOOL")
    system, user, assistant, tool = (f"<role>{name}</role>{{text}}{end}" for name in names)
    return _plain(system, user, assistant, answer, tool=tool)


def _exaone(opens: str, closes: str, user_end: str, answer: str) -> str:
    system, user, assistant, tool = (opens.format(role) + "{trimmed}" for role in _ROLES)
    return _plain(system + closes, user + user_end, assistant + closes, answer, tool=tool + closes)


_CLOSED_ROLE = "<|start_of_role|>{role}<|end_of_role|>{text}<|end_of_text|>\n"
_GRANITE = _same(_CLOSED_ROLE, "<|start_of_role|>assistant<|end_of_role|>")
_SYS = "<<SYS>>\n{text}\n<</SYS>>\n\n"
_TRIMMED_SYS = "<<SYS>>\n{trimmed}\n<</SYS>>\n\n"
_COMMAND_R = "<|START_OF_TURN_TOKEN|><|%s_TOKEN|>{trimmed}<|END_OF_TURN_TOKEN|>"
_PANGU = "[unused9]%s：{text}[unused10]"

CHATML = _same("<|im_start|>{role}\n{text}<|im_end|>\n", "<|im_start|>assistant\n")
"""For a model whose file has no template."""

BUILT_IN = {
    "bailing": _bailing("", "<role>ASSISTANT</role>"),
    "bailing-think": _bailing("", "<role>ASSISTANT</role><think>"),
    "bailing2": _without_system(
        "<role>SYSTEM</role>detailed thinking off<|role_end|>",
        _bailing("<|role_end|>", "<role>ASSISTANT</role>"),
    ),
    "chatglm3": _same("<|{role}|>\n {text}", "<|assistant|>", "[gMASK]sop"),
    "chatglm4": _same("<|{role}|>\n{text}", "<|assistant|>\n", "[gMASK]<sop>"),
    "chatml": CHATML,
    "command-r": _plain(
        _COMMAND_R % "SYSTEM", _COMMAND_R % "USER", _COMMAND_R % "CHATBOT",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "deepseek": _plain(
        "{text}", "### Instruction:\n{text}\n", "### Response:\n{text}\n<|EOT|>\n",
        "### Response:\n",
    ),
    "deepseek-ocr": _same("{text}", ""),
    "deepseek2": _plain(
        "{text}\n\n", "User: {text}\n\n", "Assistant: {text}<｜end▁of▁sentence｜>", "Assistant:"
    ),
    "deepseek3": _plain(
        "{text}\n\n", "<｜User｜>{text}", "<｜Assistant｜>{text}<｜end▁of▁sentence｜>",
        "<｜Assistant｜>",
    ),
    "exaone-moe": _exaone("<|{}|>\n", "<|endofturn|>\n", "<|endofturn|>\n", "<|assistant|>\n"),
    "exaone3": _plain(
        "[|system|]{trimmed}[|endofturn|]\n", "[|user|]{trimmed}\n",
        "[|assistant|]{trimmed}[|endofturn|]\n", "[|assistant|]",
    ),
    "exaone4": _exaone("[|{}|]", "[|endofturn|]\n", "\n", "[|assistant|]"),
    "falcon3": _same("<|{role}|>\n{text}\n", "<|assistant|>\n"),
    "gemma": _merged(
        "{trimmed}", "<start_of_turn>user\n", "{trimmed}<end_of_turn>\n",
        "<start_of_turn>model\n{trimmed}<end_of_turn>\n", "<start_of_turn>model\n",
    ),
    "gigachat": _system_first(
        "{text}<|message_sep|>",
        "user<|role_sep|>{text}<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        "assistant<|role_sep|>{text}<|message_sep|>", "assistant<|role_sep|>", "<s>",
    ),
    "glmedge": _same("<|{role}|>\n{text}", "<|assistant|>"),
    "gpt-oss": _plain(
        "<|start|>system<|message|>{text}<|end|>", "<|start|>user<|message|>{text}<|end|>",
        "<|start|>assistant<|message|>{text}<|return|>", "<|start|>assistant",
        tool="<|start|>tool<|message|>{text}<|end|>",
    ),
    "granite": _GRANITE,
    "granite-4.0": _GRANITE,
    "granite-4.1": _GRANITE,
    "grok-2": _plain(
        "System: {trimmed}<|separator|>\n\n", "Human: {trimmed}<|separator|>\n\n",
        "Assistant: {text}<|separator|>\n\n", "Assistant:",
    ),
    "hunyuan-dense": _system_first(
        "{text}<｜hy_place▁holder▁no▁3｜>", "<｜hy_User｜>{text}<｜hy_Assistant｜>",
        "<｜hy_Assistant｜>{text}<｜hy_place▁holder▁no▁2｜>", "", "",
    ),
    "hunyuan-moe": _plain(
        "<|startoftext|>{text}<|extra_4|>", "<|startoftext|>{text}<|extra_0|>", "{text}<|eos|>", "",
        tool="<|startoftext|>{text}<|extra_0|>",
    ),
    "hunyuan-vl": _system_first(
        "{text}<｜hy_place▁holder▁no▁3｜>", "{text}<｜hy_User｜>", "{text}<｜hy_Assistant｜>", "",
        "<｜hy_begin▁of▁sentence｜>",
    ),
    "kimi-k2": _plain(
        "<|im_system|>system<|im_middle|>{text}<|im_end|>",
        "<|im_user|>user<|im_middle|>{text}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>{text}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
        tool="<|im_system|>tool<|im_middle|>{text}<|im_end|>",
    ),
    "llama2": _turns("[INST] ", "[INST] ", "{text}\n", "{text} [/INST]", "{text}</s>"),
    "llama2-sys": _turns("[INST] ", "[INST] ", _SYS, "{text} [/INST]", "{text}</s>"),
    "llama2-sys-bos": _turns("[INST] ", "<s>[INST] ", _SYS, "{text} [/INST]", "{text}</s>"),
    "llama2-sys-strip": _turns(
        "[INST] ", "[INST] ", _TRIMMED_SYS, "{trimmed} [/INST]", "{trimmed}</s>"
    ),
    "llama3": _same(
        "<|start_header_id|>{role}<|end_header_id|>\n\n{trimmed}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama4": _same(
        "<|header_start|>{role}<|header_end|>\n\n{trimmed}<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
    ),
    "megrez": _same(
        "<|role_start|>{role}<|role_end|>{text}<|turn_end|>",
        "<|role_start|>assistant<|role_end|>",
    ),
    "minicpm": _plain("{trimmed}", "<用户>{trimmed}<AI>", "{trimmed}", "", tool="{trimmed}"),
    "mistral-v1": _turns(
        " [INST] ", " [INST] ", "{text}\n\n", "{text} [/INST]", " {text}</s>"
    ),
    "mistral-v3": _turns("[INST] ", "[INST] ", "{text}\n\n", "{text}[/INST]", " {trimmed}</s>"),
    "mistral-v3-tekken": _turns("[INST]", "[INST]", "{text}\n\n", "{text}[/INST]", "{text}</s>"),
    "mistral-v7": _plain(
        "[SYSTEM_PROMPT] {text}[/SYSTEM_PROMPT]", "[INST] {text}[/INST]", " {text}</s>", ""
    ),
    "mistral-v7-tekken": _plain(
        "[SYSTEM_PROMPT]{text}[/SYSTEM_PROMPT]", "[INST]{text}[/INST]", "{text}</s>", ""
    ),
    "monarch": _looped(
        "{% if not loop.first %}<s>{% endif %}" + _written("{role}\n{text}</s>\n"),
        "<s>assistant\n",
    ),
    "openchat": _plain(
        "{text}<|end_of_turn|>", "GPT4 Correct User: {text}<|end_of_turn|>",
        "GPT4 Correct Assistant: {text}<|end_of_turn|>", "GPT4 Correct Assistant:",
        tool="GPT4 Correct Tool: {text}<|end_of_turn|>",
    ),
    "orion": _merged("{text}", "Human: ", "{text}\n\nAssistant: </s>", "{text}</s>", ""),
    "pangu-embedded": _without_system(
        "[unused9]系统：[unused10]",
        _plain(
            _PANGU % "系统", _PANGU % "用户", _PANGU % "助手", "[unused9]助手：",
            tool=_PANGU % "工具",
        ),
    ),
    "phi3": _same("<|{role}|>\n{text}<|end|>\n", "<|assistant|>\n"),
    "phi4": _same(
        "<|im_start|>{role}<|im_sep|>{text}<|im_end|>", "<|im_start|>assistant<|im_sep|>"
    ),
    "rwkv-world": _looped(
        _by_role("System: {trimmed}\n\n", "User: {trimmed}\n\n", "Assistant: {trimmed}\n\n")
        + "{% if loop.last and message.role == 'user' %}Assistant:{% endif %}",
        "",
    ),
    "seed_oss": _plain(
        "<seed:bos>system\n{text}<seed:eos>", "<seed:bos>user\n{text}<seed:eos>",
        "<seed:bos>assistant\n{trimmed}<seed:eos>", "<seed:bos>assistant\n",
        tool="<seed:bos>tool\n{text}<seed:eos>",
    ),
    "smolvlm": _plain(
        "{text}\n\n", "User: {text}<end_of_utterance>\n", "Assistant: {text}<end_of_utterance>\n",
        "Assistant:", begin="<|im_start|>",
    ),
    "solar-open": _same("<|begin|>{role}<|content|>{text}<|end|>", "<|begin|>assistant"),
    "vicuna": _vicuna("{text}\n\n"),
    "vicuna-orca": _vicuna("SYSTEM: {text}\n"),
    "yandex": _plain(
        "", " Пользователь: {text}\n\n", " Ассистент: {text}\n\n", " Ассистент:[SEP]"
    ),
    "zephyr": _same("<|{role}|>\n{text}<|endoftext|>\n", "<|assistant|>\n"),
}  # fmt: skip
