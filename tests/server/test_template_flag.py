"""--chat-template takes the name of a built-in template, Jinja text or a file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fake_generator import FakeFactory
from running import StartServer

from specoffload.chat.conversation import Conversation
from specoffload.config.options import ChatOptions
from specoffload.config.resolution import chat_settings
from specoffload.errors import UsageError
from specoffload.generation.generation import ModelCard
from specoffload.session.chat import format_of
from specoffload.terminal.chat import Talk


def _card(template: str | None) -> ModelCard:
    return ModelCard("m", 512, 99, "llama", 1, 1, template, bos="<s>", eos="</s>")


def test_a_template_leaves_the_first_token_to_the_vocabulary() -> None:
    for adds, name, wanted in (
        (True, "gemma", "<s><start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"),
        (False, "gemma", "<start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"),
        (True, "gigachat", "<s>user<|role_sep|>x<|message_sep|>"),
        (True, "{{ messages[0].content }}", "<s>x"),
        (True, "{{ bos_token }}{{ messages[0].content }}", "<s>x"),
        (False, "{{ messages[0].content }}", "x"),
    ):
        card = replace(_card(None), adds_bos=adds)
        form = format_of(card, chat_settings(ChatOptions(template=name)))
        conversation = Conversation(({"role": "user", "content": "x"},))
        assert form.prepare(conversation).text.startswith(wanted)
        assert not form.prepare(conversation).text.startswith("<s><s>")


def test_a_pipe_in_place_of_a_file_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="not a regular file"):
        chat_settings(ChatOptions(template=str(pipe)))
    with pytest.raises(UsageError, match="not a regular file"):
        Talk(lambda conversation: iter(())).load(pipe)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("template", ["", "{{ messages[0].content }}"])
def test_a_server_says_when_its_model_has_no_chat_template(
    start_server: StartServer, template: str
) -> None:
    server = start_server(FakeFactory(chat_template=template))
    server.wait_until_healthy()
    words = [line for line in server.lines if "no chat template" in line]
    assert len(words) == (template == "")
    assert all("--chat-template" in line for line in words)


def test_a_template_that_was_given_is_not_missing(start_server: StartServer) -> None:
    chat = chat_settings(ChatOptions(template="gemma"))
    server = start_server(FakeFactory(chat_template=""), chat=chat)
    server.wait_until_healthy()
    assert not any("no chat template" in line for line in server.lines)
