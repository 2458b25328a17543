"""Logprobs of a prompt's own tokens equal the softmax of a plain decode's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lossless_parts import EXACT
from numpy.typing import NDArray
from test_slots import SPECS, answer_of, draft_of, model, open_slots

from lab.options import engine_options
from offload.engine import open_engine
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.slots.request import Request

N_TOP = 3
ASKED = GenerateOptions(n_predict=0, prompt_logprobs=N_TOP)
_NEAR = 2e-3  # rounding depends on the batch size
LONG = [(i * i * 7 + i) % 250 for i in range(300)]  # prompt of several decodes and ubatches


def _softmax_logs(file: Path, prompt: Sequence[int]) -> NDArray[np.float64]:
    """Log-probabilities of the token after each token of a prompt, [n, n_vocab]."""
    with open_engine(file, engine_options(device="cpu", n_ctx=1024, **EXACT)) as engine:
        x = engine.sequences.extend(0, prompt).astype(np.float64)
    x -= x.max(1, keepdims=True)
    logs: NDArray[np.float64] = x - np.log(np.exp(x).sum(1, keepdims=True))
    return logs


def _check(request: Request, prompt: Sequence[int], logs: NDArray[np.float64]) -> None:
    told = [token for piece in request.pieces for token in piece.prompt_logprobs]
    assert [token.chosen.token for token in told] == list(prompt)
    assert math.isnan(told[0].chosen.logprob)
    assert told[0].top == ()
    for row, token in zip(logs, told[1:], strict=False):
        assert token.chosen.logprob == pytest.approx(row[token.chosen.token], abs=_NEAR)
        best = np.sort(row)[::-1][:N_TOP]
        assert [other.logprob for other in token.top] == pytest.approx(best, abs=_NEAR)
        for other in token.top:
            assert other.logprob == pytest.approx(row[other.token], abs=_NEAR)


def _finish(session: Session) -> None:
    while not session.is_idle:
        session.step()


@pytest.mark.parametrize("kind", ["deepseek-v3", "mamba2", "qwen3next"])
def test_they_are_the_models_own_beside_others_and_whatever_is_held(
    models: Path, kind: str
) -> None:
    file = model(kind, models)
    logs = _softmax_logs(file, LONG)
    writes = GenerateOptions(n_predict=24, ignore_eos=True)
    with open_slots(file, SPECS["suffix"], 3, ubatch_size=32, batch_size=128) as session:
        alone = session.start(LONG[:40], writes)
        _finish(session)
        wanted = answer_of(alone).tokens

        beside = session.start(LONG[:40], writes)
        session.step()
        asked = [session.start(LONG, ASKED), session.start(LONG[:100], ASKED)]
        reads = session.start(LONG[150:280], writes)  # a request without prompt logprobs
        _finish(session)
        assert answer_of(beside).tokens == wanted
        assert len(answer_of(reads).tokens) == 24
        _check(asked[0], LONG, logs)
        _check(asked[1], LONG[:100], logs)
        # The prompt is evaluated from its first token, although slots hold its beginning by now.
        again = session.start(LONG, ASKED)
        _finish(session)
        _check(again, LONG, logs)
        stats = answer_of(again).stats
        assert (stats.n_cached_tokens, stats.n_tokens) == (0, 0)


def test_a_prompt_that_loses_its_cells_is_told_once(models: Path) -> None:
    file = model("mistral-large", models)
    draft = draft_of("itself", "mistral-large", models)
    logs = _softmax_logs(file, LONG)
    writes = GenerateOptions(n_predict=200, ignore_eos=True)
    with open_slots(file, SPECS["itself"], 2, draft=draft, ctx_size=512) as session:
        beside = session.start(LONG[:200], writes)
        while not any(piece.tokens for piece in beside.pieces):
            session.step()
        asked = session.start(LONG, replace(writes, prompt_logprobs=N_TOP))
        has_waited = False
        while not session.is_idle:
            session.step()
            has_begun = any(piece.prompt_logprobs for piece in asked.pieces)
            has_waited |= has_begun and asked.slot is None and not asked.is_over
        assert has_waited
        assert len(answer_of(beside).tokens) == len(answer_of(asked).tokens) == 200
        _check(asked, LONG, logs)


def test_a_prompt_of_one_token_has_no_probability_and_an_answer(models: Path) -> None:
    with open_slots(model("mistral-large", models), SPECS["alone"], 1) as session:
        request = session.start([65], GenerateOptions(n_predict=1, prompt_logprobs=1, n_probs=1))
        _finish(session)
        [token] = [token for piece in request.pieces for token in piece.prompt_logprobs]
        assert token.chosen.token == 65
        assert math.isnan(token.chosen.logprob)
        assert len(answer_of(request).tokens) == 1
