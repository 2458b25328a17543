"""What idle conversations cost a request that runs alone: time of the CPU, not of a clock.

Another program does not change that time, so a ratio of two of them is the same on a busy machine.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from combinations.opening import open_words
from combinations.play import SAMPLING, finish
from combinations.small_models import draft_of, model_of
from specoffload.session.session import Session

_N_IDLE, _IDLE_TOKENS, _TOKENS = 3, 3000, 600
_MOST_RATIO = 1.3
_FIXED = ("--spec-policy", "fixed", "--spec-draft-n-max", "2")


@pytest.mark.parametrize(
    ("memory", "drafter"),
    [
        ("full", "none"),
        pytest.param("mla", "none", marks=pytest.mark.slow),
        pytest.param("dense", "none", marks=pytest.mark.slow),
        ("sinks", "none"),
        pytest.param("full", "own layers", marks=pytest.mark.slow),
        pytest.param("dense", "draft", marks=pytest.mark.slow),
    ],
)
def test_a_request_pays_for_its_own_conversation_only(
    models: Path, memory: str, drafter: str
) -> None:
    """Drafts have a fixed length, so that both requests decode the same batches."""
    model = model_of(memory, models)
    drafts = {
        "none": ["--spec-type", "none"],
        "own layers": ["--spec-type", "draft-mtp", *_FIXED],
        "draft": ["-md", str(draft_of(drafter, model, models)), "--spec-type", "draft", *_FIXED],
    }
    words = [
        str(model), "--device", "cpu", "--threads", "1", "--parallel", str(_N_IDLE + 1),
        "--ctx-size", "16384", *drafts[drafter],
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECOFFLOAD_WITHOUT", "profile")
        session = open_words(words)
    try:
        _cpu_s(session, 0, _TOKENS)  # warms up
        session.forget()
        alone_s = _cpu_s(session, 1, _TOKENS)
        session.forget()
        for i in range(_N_IDLE):
            _cpu_s(session, 2 + i, _IDLE_TOKENS)
        beside_s = _cpu_s(session, 9, _TOKENS)
    finally:
        session.close()
    assert beside_s < _MOST_RATIO * alone_s


def _cpu_s(session: Session, seed: int, n_tokens: int) -> float:
    """Seconds that the processors compute for a fresh prompt and its answer."""
    prompt = np.random.default_rng(seed).integers(40, 120, n_tokens).tolist()
    began_s = time.process_time()
    request = session.start(prompt, SAMPLING["greedy"])
    finish(session.step, lambda: session.is_idle)
    assert request.error is None
    return time.process_time() - began_s
