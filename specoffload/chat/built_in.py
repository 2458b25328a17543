"""llama.cpp's built-in chat templates as Jinja, by the names of --chat-template.

llama.cpp has them as code (llama_chat_apply_template), which the process that renders templates
does not load. `built_in.json` has the forms of each template's messages; a test compares what they
write with the pinned library.
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Callable
from typing import Any

# In a form, {text} is the message's text, {trimmed} the text without white space around it, and
# {role} the message's role.
_EXPRESSIONS = {
    "{text}": "message.content",
    "{trimmed}": "message.content | trim(' \\t\\n\\r\\x0b\\x0c')",
    "{role}": "message.role",
}
_ROLES = ("system", "user", "assistant", "tool")


def _written(form: str) -> str:
    """A Jinja expression that writes a form."""
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


_KINDS: dict[str, Callable[..., str]] = {
    "jinja": str,
    "plain": _plain,
    "same": _same,
    "system_first": _system_first,
    "without_system": lambda begin, template: _without_system(begin, _template(template)),
    "turns": _turns,
    "merged": _merged,
}


def _template(row: list[Any]) -> str:
    """A template from its kind and forms; the last element may have further forms by name."""
    kind, *forms = row
    named = forms.pop() if isinstance(forms[-1], dict) else {}
    return _KINDS[kind](*forms, **named)


def _read() -> dict[str, str]:
    data = pkgutil.get_data("specoffload.chat", "built_in.json")
    assert data is not None
    return {name: _template(row) for name, row in json.loads(data).items()}


BUILT_IN = _read()
CHATML = BUILT_IN["chatml"]
"""For a model whose file has no template."""
