"""A draft model reads a prompt of 22,000 tokens, in several decodes, before its first draft."""

from __future__ import annotations

import pytest
import resolved

from specoffload.config.resolution import demo_prompts
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

pytestmark = pytest.mark.slow

N_PROMPT, N_PREDICT = 22_000, 24


def test_a_draft_model_reads_a_prompt_of_22_thousand_tokens() -> None:
    """The prompt repeats one file, so a draft model that read all of it drafts what follows."""
    spec = {"--spec-type": "draft", "--spec-policy": "fixed", "--draft-max": 4}
    config = resolved.config_of(
        device="cpu", threads=1, ctx_size=N_PROMPT + 256, batch_size=512, spec_given=spec
    )
    with Session(config) as session:
        assert session.draft is not None
        text = session.tokenize(
            "\n".join(demo_prompts("code")), add_special=True, parse_special=False
        )
        prompt = (text * (1 + N_PROMPT // len(text)))[:N_PROMPT]
        options = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
        pieces = list(session.generate(prompt, options))
        stats = pieces[-1].stats
        assert stats is not None
        assert stats.n_prompt_tokens == N_PROMPT
        # It holds the prompt, and of the answer at least what the last draft followed.
        assert session.draft.sequences.length(0) >= N_PROMPT
        assert stats.n_drafted >= N_PREDICT // 5
        drafted = [t for piece in pieces for t in piece.tokens]
        plainly = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True, draft_max=0)
        plain = [t for piece in session.generate(prompt, plainly) for t in piece.tokens]
    assert drafted == plain
