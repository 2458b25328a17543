"""Sampled text with a model's own layers (MTP) has the target's distribution, by chi-square tests.

The target is the embedded one, whose layer drafts well, so that drafts of all lengths are accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from resolved import config_of

from offload.ggml.sampler import SamplerChain
from offload.sampling.options import SamplingOptions
from specoffload.config.resolution import demo_file
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

PROMPT = "Once upon a time there was a"
N_TEXTS = 600
LEAST = 6  # texts that a class must have by expectation
CHAINS: dict[str, dict[str, Any]] = {
    "flat": {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "top-k": {"temperature": 0.5, "top_k": 3, "top_p": 1.0, "min_p": 0.0},  # excludes tokens
    "top-p": {"temperature": 1.0, "top_k": 40, "top_p": 0.7, "min_p": 0.0},
}


@pytest.fixture(scope="module", params=["match", "reject"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    given = {"--spec-type": "mtp", "--spec-policy": "fixed", "--spec-draft-n-max": 2}
    given["--spec-accept"] = request.param
    config = config_of(
        model=demo_file("target.gguf"), device="cpu", threads=1, ctx_size=512, spec_given=given
    )
    with Session(config) as opened:
        yield opened


def rare(n_degrees: int) -> float:
    """The chi-square value that chance exceeds once in a million times (Wilson and Hilferty)."""
    part = 2 / (9 * n_degrees)
    return float(n_degrees * (1 - part + 4.753 * np.sqrt(part)) ** 3)


def probabilities(session: Session, text: list[int], chain: SamplerChain) -> Any:
    sequences = session.target.sequences
    sequences.rewind(0, 0)
    return chain.probabilities(sequences.extend(0, text, 1)[0], ())


@pytest.mark.parametrize("name", CHAINS)
def test_sampled_text_has_the_target_s_distribution(session: Session, name: str) -> None:
    """Classes are pairs of the second and third token, which drafts may have written."""
    prompt = session.tokenize(PROMPT, add_special=True, parse_special=False)
    options, shape = SamplingOptions(**CHAINS[name], seed=1, ignore_eos=True), dict(CHAINS[name])
    session.forget()
    with closing(SamplerChain(session.target.model, options)) as chain:
        first = int(probabilities(session, prompt, chain).argmax())
        text = [*prompt, first]
        p = probabilities(session, text, chain)
        pairs = {
            (second, third): float(p[second] * q)
            for second in np.argsort(-p)[:12].tolist()
            if p[second]
            for third, q in enumerate(probabilities(session, [*text, second], chain))
        }
    session.target.sequences.rewind(0, 0)
    counts = Counter[tuple[int, int]]()
    n_accepted = 0
    for seed in range(N_TEXTS):
        wanted = GenerateOptions(n_predict=3, ignore_eos=True, seed=seed, **shape)
        pieces = list(session.generate(text, wanted))
        second, third, _ = [t for piece in pieces for t in piece.tokens]
        counts[second, third] += 1
        stats = pieces[-1].stats
        assert stats is not None
        n_accepted += stats.n_accepted
    classes = [pair for pair, chance in pairs.items() if chance * N_TEXTS >= LEAST]
    expected = np.array([pairs[pair] for pair in classes])
    seen = np.array([counts[pair] for pair in classes])
    rest = 1 - expected.sum()
    if rest * N_TEXTS >= LEAST:
        expected, seen = np.append(expected, rest), np.append(seen, N_TEXTS - seen.sum())
    statistic = float(((seen - N_TEXTS * expected) ** 2 / (N_TEXTS * expected)).sum())
    assert len(expected) > 3
    assert statistic < rare(len(expected) - 1)
    assert n_accepted > N_TEXTS / 8
    if name == "top-k":
        assert all(pairs.get(pair, 0) > 0 for pair in counts), "excluded tokens were written"
