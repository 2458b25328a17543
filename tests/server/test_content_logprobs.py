"""A chat's log probabilities are those of its content, not of reasoning and stop sequences."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from told_answers import ended

from offload.sampling.answers import ChosenLogprob, TokenLogprob
from specoffload.chat.families import FAMILIES, GENERIC
from specoffload.chat.format import ChatPrompt
from specoffload.chat.parser import AnswerForm
from specoffload.generation.generation import TextPiece
from specoffload.server.api.openai import ChatWording
from specoffload.server.api.requests import ChatRequest
from specoffload.slots.stopping import StopScanner

THINK = ("<think>", "</think>")
FORMS = {
    "no reasoning": AnswerForm(GENERIC),
    "may think": AnswerForm(GENERIC, reasoning=THINK),
    "thinks": AnswerForm(GENERIC, reasoning=THINK, thinking=True),
    "left in the content": AnswerForm(GENERIC, reasoning=THINK, reasoning_format="none"),
    "gpt-oss": AnswerForm(FAMILIES[0]),
}
REASONED = {
    "no reasoning": "",
    "may think": "<think>hm STOP</think>\n\n",
    "thinks": "hm STOP</think>\n\n",
    "left in the content": "",
    "gpt-oss": "<|channel|>analysis<|message|>hm STOP<|end|><|start|>assistant"
    "<|channel|>final<|message|>",
}


def pieces_of(tokens: list[str], stops: StopScanner, n_at_once: int) -> list[TextPiece]:
    """The pieces of an answer of these tokens, as the engine makes them."""
    found = []
    for at in range(0, len(tokens), n_at_once):
        taken, shown = [], ""
        for token in tokens[at : at + n_at_once]:
            taken.append(ChosenLogprob(TokenLogprob(0, token.encode(), -1.0), ()))
            shown += stops.feed(token)
            if stops.stopped:
                break
        found.append(TextPiece(shown, tuple(range(len(taken))), logprobs=tuple(taken)))
        if stops.stopped:
            return [*found, ended("stop", stops.word)]
    last = ended("stop")
    return [*found, TextPiece(stops.finish(), (), "stop", last.stats)]


def told(wording: ChatWording, pieces: list[TextPiece]) -> list[dict[str, Any]]:
    lines = b"".join(wording.piece(0, piece) for piece in pieces).decode().splitlines()
    return [json.loads(line[6:])["choices"][0] for line in lines if line]


@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from(["It is 4.", "It is STOP 4.", "4.ST", "4 <think>"]),
)
def test_content_has_its_tokens_and_no_others(
    name: str, n_letters: int, n_at_once: int, answer: str
) -> None:
    form = FORMS[name]
    text = REASONED[name]
    # No token reaches from the reasoning into the answer.
    tokens = [text[i : i + n_letters] for i in range(0, len(text), n_letters)]
    tokens += [answer[i : i + n_letters] for i in range(0, len(answer), n_letters)]
    request = ChatRequest.model_validate({"messages": [], "logprobs": True, "top_logprobs": 0})
    wording = ChatWording(ChatPrompt("", form), "m", request)
    events = told(wording, pieces_of(tokens, StopScanner(("STOP",), form.span), n_at_once))
    choice = json.loads(wording.whole())["choices"][0]
    content = choice["message"]["content"]
    assert content == answer.partition("STOP")[0]
    entries = choice["logprobs"]["content"]
    joined = "".join(entry["token"] for entry in entries)
    # The token in which the stop sequence begins may have text of the answer before it.
    assert joined.startswith(content)
    assert len(joined) - len(content) < n_letters
    streamed = [entry for event in events for entry in (event["logprobs"] or {}).get("content", ())]
    assert streamed == entries
