"""llama.cpp's built-in chat templates, written as Jinja, render like the library's own code."""

from __future__ import annotations

import ctypes as C

import llama_cpp.llama_cpp as native
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.chat.families import BUILT_IN
from specoffload.chat.templates import render

Messages = list[tuple[str, str]]
_TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
_TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), _TEXT), min_size=1, max_size=5)
_TALKS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), _TEXT), min_size=1, max_size=5
) | st.builds(lambda text, turns: [("system", text), *turns], _TEXT, _TURNS)


def by_library(name: str, messages: Messages, answer: bool) -> str:
    """The library's prompt for a conversation."""
    chat = (native.llama_chat_message * len(messages))(
        *(native.llama_chat_message(role.encode(), text.encode()) for role, text in messages)
    )
    size = 4096
    buffer = C.create_string_buffer(size)
    n = native.llama_chat_apply_template(name.encode(), chat, len(messages), answer, buffer, size)
    assert 0 <= n <= size, name
    return buffer.raw[:n].decode()


def by_us(name: str, messages: Messages, answer: bool) -> str:
    asked = [{"role": role, "content": text} for role, text in messages]
    return render(name, BUILT_IN[name], {"messages": asked, "add_generation_prompt": answer})


def test_every_name_of_the_library_is_known() -> None:
    n = native.llama_chat_builtin_templates(None, 0)
    names = (C.c_char_p * n)()
    native.llama_chat_builtin_templates(names, n)
    assert sorted(BUILT_IN) == sorted(name.decode() for name in names if name is not None)


@pytest.mark.parametrize("name", BUILT_IN)
@given(messages=_TALKS, answer=st.booleans())
def test_a_prompt_is_the_librarys(name: str, messages: Messages, answer: bool) -> None:
    assert by_us(name, messages, answer) == by_library(name, messages, answer)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_tools_result_that_is_written_is_written_as_by_the_library(name: str) -> None:
    messages = [("user", "?"), ("assistant", "!"), ("tool", " needle "), ("assistant", "so")]
    ours = by_us(name, messages, True)
    if "needle" in ours:  # otherwise the template gets it as the user's text
        assert ours == by_library(name, messages, True)
