"""A draft model whose batch is smaller than its prompt, or than all requests together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from speculation_parts import proposed

from offload.engine import Engine, EngineOptions
from specdec.drafters.model import ModelDrafter
from specdec.policies.rules import Fixed
from specdec.types import DraftRequest
from specoffload.commands.bench import prompts
from specoffload.config.resolution import demo_file

N_BATCH, N_REQUESTS = 64, 32


def opened(n_batch: int, n_sequences: int) -> Engine:
    """The embedded draft; keys in f32 make its logits depend less on how a text is cut."""
    options = EngineOptions(
        device="cpu", wrapped=False, stream_experts=False,
        n_ctx=2048, n_batch=n_batch, n_ubatch=n_batch, n_sequences=n_sequences,
        type_k="f32", type_v="f32", flash_attn="off",
    )  # fmt: skip
    return Engine(demo_file("draft.gguf"), options)


@pytest.fixture(scope="module")
def small() -> Iterator[Engine]:
    with opened(N_BATCH, N_REQUESTS) as engine:
        yield engine


@pytest.fixture(scope="module")
def text(small: Engine) -> list[int]:
    return small.tokenize("\n".join(prompts("code")), add_special=True, parse_special=False)


def test_a_prompt_longer_than_the_drafts_batch_is_drafted_from(
    small: Engine, text: list[int]
) -> None:
    prompt = text[: 5 * N_BATCH + 3]
    assert small.sequences.n_batch == N_BATCH
    draft = proposed(ModelDrafter(small.sequences), 0, prompt, Fixed(4), 4)
    assert small.sequences.length(0) == len(prompt) + 3
    with opened(2048, 1) as whole:
        wanted = proposed(ModelDrafter(whole.sequences), 0, prompt, Fixed(4), 4)
    assert draft.tokens == wanted.tokens
    assert draft.probs == pytest.approx(wanted.probs, rel=1e-3)


def test_requests_that_exceed_the_drafts_batch_are_drafted_for_in_several_decodes(
    small: Engine, text: list[int]
) -> None:
    texts = [text[7 * i : 7 * i + 8] for i in range(N_REQUESTS)]  # 256 new tokens
    policy = Fixed(3)
    together = ModelDrafter(small.sequences)
    drafts = together.propose([DraftRequest(i, t, policy, 3) for i, t in enumerate(texts)])
    assert [len(draft.tokens) for draft in drafts] == [3] * N_REQUESTS
    lengths = [small.sequences.length(i) for i in range(N_REQUESTS)]
    assert lengths == [10] * N_REQUESTS, "the last drafted token is never decoded"
    for i in range(N_REQUESTS):
        small.sequences.rewind(i, 0)
    one = ModelDrafter(small.sequences)
    alone = [proposed(one, i, t, policy, 3) for i, t in enumerate(texts)]
    assert [draft.tokens for draft in drafts] == [draft.tokens for draft in alone]
