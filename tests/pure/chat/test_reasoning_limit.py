"""A limit on reasoning tokens: where reasoning begins and ends, and which tokens are forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from published import chat_format

from offload.sampling.answers import ChosenLogprob, LimitedReasoning, LimitedSampler, ReasoningLimit
from specdec.decoding.acceptance import MatchAcceptance, RejectionAcceptance
from specdec.decoding.loop import NO_DRAFT
from specoffload.chat.conversation import Conversation, ReasoningOptions
from specoffload.chat.format import ChatFormat
from specoffload.generation.generation import GenerateOptions
from specoffload.session.chat import answer_options

OPENS, CLOSES = "<think>", "</think>"
ENDING = tuple(CLOSES.encode())
N_VOCAB = 256


def followed(text: str, n_tokens: int, *, is_open: bool) -> str:
    """The output if a model writes `text` byte by byte and the limit inserts its forced tokens."""
    limit = LimitedReasoning(ReasoningLimit(n_tokens, OPENS, CLOSES, CLOSES, is_open), ENDING)
    written, wanted = bytearray(), iter(text.encode())
    while True:
        token = limit.due[0] if limit.due else next(wanted, None)
        if token is None:
            return written.decode()
        limit.accepted(token, bytes([token]))
        written.append(token)


@given(st.text("ab<>/think ", max_size=40), st.integers(0, 20))
def test_opened_reasoning_is_closed_after_so_many_tokens_and_never_twice(
    text: str, n_tokens: int
) -> None:
    found = followed(text, n_tokens, is_open=True)
    end = text.find(CLOSES)
    if 0 <= end <= n_tokens - len(CLOSES):
        assert found == text  # reasoning ended by itself
    elif len(text) >= n_tokens:
        assert found == text[:n_tokens] + CLOSES + text[n_tokens:]
    else:
        assert found == text


@given(st.text("ab<>/think \n", max_size=40))
def test_an_answer_that_begins_otherwise_does_not_reason(text: str) -> None:
    if text.lstrip().startswith(OPENS) or OPENS.startswith(text.lstrip()):
        return
    assert followed(text, 0, is_open=False) == text


def test_an_answer_may_open_its_reasoning_itself() -> None:
    assert followed("\n<think>abcdef", 3, is_open=False) == "\n<think>abc</think>def"
    assert followed("<think>ab</think>cdefgh", 12, is_open=False) == "<think>ab</think>cdefgh"
    assert followed("<think>abc", 0, is_open=False) == "<think></think>abc"
    assert followed("a<think>bcdef", 1, is_open=False) == "a<think>bcdef"


class _Likeliest:
    """Chooses the likeliest token, and records accepted tokens."""

    has_distribution = True

    def __init__(self, refused: int = -1) -> None:
        self.seen: list[int] = []
        self._refused = refused

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        return int(np.argmax(logits))

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        out = np.zeros(N_VOCAB)
        out[self.choose(logits, history)] = 1.0
        return out

    def allows(self, token: int) -> bool:
        return token != self._refused

    def accepted(self, token: int) -> None:
        self.seen.append(token)

    def take_logprobs(self) -> tuple[ChosenLogprob, ...]:
        return ()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("rejects", [False, True])
def test_drafts_are_judged_by_what_must_come(rejects: bool) -> None:
    """A draft that continues the reasoning is cut where the limit ends the reasoning."""
    inner = _Likeliest()
    limit = LimitedReasoning(ReasoningLimit(2, OPENS, CLOSES, CLOSES, is_open=True), ENDING)
    sampler = LimitedSampler(inner, limit, lambda token: bytes([token]))
    rows = np.zeros((5, N_VOCAB), np.float32)
    rows[:, ord("a")] = 1.0
    judge = (
        RejectionAcceptance(sampler, np.random.default_rng(1))
        if rejects
        else MatchAcceptance(sampler)
    )
    history: list[int] = []
    verdict = judge(
        replace(NO_DRAFT, tokens=(ord("a"),) * 4, probs=(1.0,) * 4),
        rows,
        history,
        lambda token: False,
    )
    assert bytes(verdict.emitted) == b"aa<"
    assert verdict.n_accepted == 2
    while limit.due:
        judge(NO_DRAFT, rows[:1], history, lambda token: False)
    judge(NO_DRAFT, rows[:1], history, lambda token: False)
    assert bytes(history) == bytes(inner.seen) == b"aa</think>a"


def test_a_character_is_written_to_its_end_before_the_reasoning_is_ended() -> None:
    assert followed("aééb", 2, is_open=True) == "aé</think>éb"
    limit = LimitedReasoning(ReasoningLimit(1, OPENS, CLOSES, CLOSES, is_open=True), ENDING)
    for n in range(4):  # bytes that begin characters and never end one
        assert not limit.due, n
        limit.accepted(0xF0, b"\xf0")
    assert limit.due


def test_the_model_chooses_among_branches_and_what_it_opens_again_counts_too() -> None:
    limit = ReasoningLimit(
        3, "<a>", "</a>", "</a>", branches=("<b>", "<c>"), is_open=True, reopens=True
    )
    limited = LimitedReasoning(limit, *limit.endings(lambda text: tuple(text.encode())))
    inner = _Likeliest()
    sampler = LimitedSampler(inner, limited, lambda token: bytes([token]))
    wanted = np.zeros(N_VOCAB, np.float32)
    wanted[ord("c")] = 1.0
    for _ in range(10):
        sampler.accepted(sampler.choose(wanted, inner.seen))
    assert bytes(inner.seen) == b"ccc</a><c>"
    for byte in b"<a>":
        assert not limited.due
        sampler.accepted(byte)
    assert limited.due  # nothing is left for more reasoning


def test_a_grammar_has_the_last_word_on_forced_tokens() -> None:
    limited = LimitedReasoning(ReasoningLimit(0, OPENS, CLOSES, CLOSES, is_open=True), ENDING)
    inner = _Likeliest(refused=ord("i"))
    sampler = LimitedSampler(inner, limited, lambda token: bytes([token]))
    row = np.zeros(N_VOCAB, np.float32)
    row[ord("x")] = 1.0
    for _ in range(6):
        sampler.accepted(sampler.choose(row, inner.seen))
    assert bytes(inner.seen) == b"</thxx"


def test_the_limit_counts_on_from_what_the_prompt_has_begun() -> None:
    form = chat_format("openai-gpt-oss-120b")
    options = GenerateOptions(reasoning_budget=7)

    def limit(**last: str) -> ReasoningLimit | None:
        messages = ({"role": "user", "content": "x"}, {"role": "assistant", **last})
        prompt = form.prepare(Conversation(messages, continues="auto"))
        return answer_options(prompt, options).reasoning_limit

    begun = limit(reasoning_content="Hm")
    assert begun is not None
    assert begun.is_open
    assert limit(content="So") is None


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{{ '<think>' }}", ReasoningLimit(7, OPENS, CLOSES, CLOSES, is_open=True)),
        ("{# </think> #}x", ReasoningLimit(7, OPENS, CLOSES, CLOSES)),
        ("x", None),
    ],
)
def test_the_format_says_what_closes_it(template: str, limit: ReasoningLimit | None) -> None:
    form = ChatFormat.of(template)
    asked = Conversation(({"role": "user", "content": "x"},), reasoning=ReasoningOptions())
    prompt = form.prepare(asked)
    assert answer_options(prompt, GenerateOptions(reasoning_budget=7)).reasoning_limit == limit
    assert answer_options(prompt, GenerateOptions()).reasoning_limit is None
    told = GenerateOptions(reasoning_budget=7, reasoning_budget_message="Enough.")
    worded = None if limit is None else replace(limit, ending="Enough." + CLOSES)
    assert answer_options(prompt, told).reasoning_limit == worded
