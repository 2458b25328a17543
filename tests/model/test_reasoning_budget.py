"""The embedded pair's reasoning ends after the given number of tokens, with drafts and without."""

from __future__ import annotations

from typing import Any

import pytest
from resolved import config_of

from specoffload.chat.conversation import Content, Conversation, Reasoning
from specoffload.chat.format import ChatFormat
from specoffload.config.speculation import NO_DRAFTS
from specoffload.generation.generation import GenerateOptions, TextPiece
from specoffload.generation.statistics import GenerationStats
from specoffload.session.chat import answer
from specoffload.session.session import Session

OPENED = ChatFormat.of("{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' }}")
FIXED: dict[str, object] = {"--spec-policy": "fixed", "--spec-draft-n-max": 4}
N = 32


def written(session: Session, **options: Any) -> tuple[str, str, GenerationStats]:
    asked = Conversation(({"role": "user", "content": "def fibonacci(n):\n"},))
    session.forget()
    thought, said, stats = "", "", GenerationStats()
    wanted = GenerateOptions(n_predict=N, ignore_eos=True, **options)
    for part in answer(session, OPENED, asked, wanted)[1]:
        if isinstance(part, Reasoning):
            thought += part.text
        elif isinstance(part, Content):
            said += part.text
        elif isinstance(part, TextPiece):
            stats = part.stats or stats
    return thought, said, stats


@pytest.mark.parametrize(("rule", "temperature"), [("match", 0.0), ("reject", 1.0)])
def test_reasoning_is_ended_and_the_answer_follows(rule: str, temperature: float) -> None:
    common: dict[str, Any] = {"device": "cpu", "threads": 1, "ctx_size": 512}
    given = {**FIXED, "--spec-accept": rule}
    with Session(config_of(**common, spec_given=given)) as session:
        free, nothing, _ = written(session, temperature=temperature, seed=3)
        thought, said, stats = written(
            session, temperature=temperature, seed=3, reasoning_budget=5, n_probs=2
        )
        none, at_once, _ = written(session, temperature=temperature, seed=3, reasoning_budget=0)
        worded, after, _ = written(
            session,
            temperature=temperature,
            seed=3,
            reasoning_budget=5,
            reasoning_budget_message="\nEnough.\n",
        )
    assert stats.n_drafted > 0
    assert nothing == ""  # the pair never closes reasoning by itself
    assert len(free) > len(thought) > 0
    assert said.strip()
    assert worded.rstrip().endswith("\nEnough.")
    assert after.strip()
    assert (none, bool(at_once.strip())) == ("", True)
    assert stats.n_tokens == N
    if temperature == 0.0:
        assert free.startswith(thought)
        with Session(config_of(**common, spec=NO_DRAFTS)) as plain:
            assert written(plain, reasoning_budget=5)[:2] == (thought, said)
