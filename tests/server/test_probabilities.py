"""Token probabilities in whole and streamed answers equal the softmax of the model's logits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from program import Program
from resolved import config_of
from running import http

from specoffload.config.speculation import NO_DRAFTS
from specoffload.session.session import Session

PROMPT = "def fibonacci(n):\n"
N = 12
SAMPLED = {"temperature": 1.0, "top_k": 3, "seed": 7, "ignore_eos": True}
_NEAR = 0.02  # quantised kernels round differently for each batch size


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(config_of(device="cpu", threads=1, ctx_size=512, spec=NO_DRAFTS)) as opened:
        yield opened


def _events(answer: Any) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line and line != "data: [DONE]"]
    return [json.loads(line) for line in lines]


def _softmax_logs(session: Session, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Log-probabilities from which each of `tokens` was chosen, [n, n_vocab]."""
    prompt = session.tokenize(PROMPT, add_special=True, parse_special=True)
    session.forget()
    rows = session.target.sequences.extend(0, [*prompt, *tokens])[len(prompt) - 1 : -1]
    session.forget()
    x = rows.astype(np.float64)
    x -= x.max(1, keepdims=True)
    logs: NDArray[np.float64] = x - np.log(np.exp(x).sum(1, keepdims=True))
    return logs


def test_n_probs_are_the_models_own(pair: Program, session: Session) -> None:
    body = {"prompt": PROMPT, "n_predict": N, "n_probs": 4, **SAMPLED}
    whole = http.post(pair.url + "/completion", json=body).json()["completion_probabilities"]
    events = _events(http.post(pair.url + "/completion", json={**body, "stream": True}))
    streamed = [token for event in events for token in event.get("completion_probabilities", ())]
    for told in (whole, streamed):  # drafts change batches, so the two may differ a little
        _check_probabilities(session, told)


def _check_probabilities(session: Session, told: list[dict[str, Any]]) -> None:
    assert len(told) == N
    logs = _softmax_logs(session, [token["id"] for token in told])
    for row, token in zip(logs, told, strict=True):
        assert bytes(token["bytes"]) == session.piece(token["id"])
        assert token["logprob"] == pytest.approx(row[token["id"]], abs=_NEAR)
        best = sorted(row)[::-1][:4]
        assert [t["logprob"] for t in token["top_logprobs"]] == pytest.approx(best, abs=_NEAR)
        for other in token["top_logprobs"]:
            assert other["logprob"] == pytest.approx(row[other["id"]], abs=_NEAR)


def test_post_sampling_probs_are_of_what_the_samplers_left(pair: Program, session: Session) -> None:
    body = {"prompt": PROMPT, "n_predict": N, "n_probs": 8, "post_sampling_probs": True, **SAMPLED}
    body |= {"top_p": 1.0, "min_p": 0.0}
    found = http.post(pair.url + "/completion", json=body).json()["completion_probabilities"]
    logs = _softmax_logs(session, [token["id"] for token in found])
    for row, token in zip(logs, found, strict=True):
        left = np.exp(np.sort(row)[::-1][:3])  # top_k 3
        told = [other["prob"] for other in token["top_probs"]]
        assert told == pytest.approx(left / left.sum(), abs=_NEAR)
        assert token["prob"] in told


def test_logprobs_of_completions_have_openais_shape(pair: Program, session: Session) -> None:
    asked: dict[str, Any] = {"model": "any", "prompt": PROMPT, "max_tokens": N, "logprobs": 2}
    asked |= {"temperature": 1.0, "seed": 7, "extra_body": {"top_k": 3, "ignore_eos": True}}
    with pair.client() as client:
        answer = client.completions.create(**asked)
        chunks = list(client.completions.create(**asked, stream=True))
    [choice] = answer.choices
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    assert "".join(told.tokens) == choice.text
    pieces = zip(told.text_offset, told.tokens, strict=True)
    assert all(choice.text[at:].startswith(token) for at, token in pieces)
    native = {"prompt": PROMPT, "n_predict": N, "return_tokens": True, **SAMPLED}
    same = http.post(pair.url + "/completion", json=native).json()
    assert same["content"] == choice.text
    logs = _softmax_logs(session, same["tokens"])
    expected = [row[i] for row, i in zip(logs, same["tokens"], strict=True)]
    assert told.token_logprobs == pytest.approx(expected, abs=_NEAR)
    for logprob, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert len(top) == 2
        assert logprob <= max(top.values())
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens or ()] == told.tokens
    assert [at for part in parts for at in part.text_offset or ()] == told.text_offset


def test_no_more_tokens_are_told_than_text_and_of_several_each_has_its_own(
    pair: Program,
) -> None:
    body = {"prompt": [PROMPT, PROMPT], "max_tokens": N, "logprobs": 0, "temperature": 0}
    body |= {"speculative.n_max": 0}  # drafts change batches, and batches change near-ties
    first, second = http.post(pair.url + "/v1/completions", json=body).json()["choices"]
    for choice in (first, second):  # texts may differ at near-ties
        assert len(choice["logprobs"]["tokens"]) == N
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert first["logprobs"]["top_logprobs"] is None
    # Each of the two evaluated the prompt in another batch, and later requests take either. So
    # texts may differ at near ties, which come after the first word.
    text = first["text"]
    stop = text[2:4]
    cut = http.post(pair.url + "/v1/completions", json={**body, "prompt": PROMPT, "stop": stop})
    shown = cut.json()["choices"][0]
    assert shown["text"] == text[:2]
    last = shown["logprobs"]["text_offset"][-1]
    assert last < len(shown["text"]) <= last + len(shown["logprobs"]["tokens"][-1])


def _echoed(pair: Program, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(pair.url + "/v1/completions", json={"echo": True, **body})
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


@pytest.mark.parametrize("n_predict", [0, 1, 5])
def test_an_echoed_prompt_has_the_probabilities_of_its_own_tokens(
    pair: Program, session: Session, n_predict: int
) -> None:
    ids = session.tokenize(PROMPT, add_special=True, parse_special=True)
    asked: dict[str, Any] = {"max_tokens": n_predict, "logprobs": 2, "temperature": 0}
    asked |= {"ignore_eos": True}
    session.forget()
    x = session.target.sequences.extend(0, ids).astype(np.float64)
    session.forget()
    x -= x.max(1, keepdims=True)
    logs = x - np.log(np.exp(x).sum(1, keepdims=True))
    texts = _echoed(pair, prompt=[PROMPT, PROMPT], **asked)
    assert texts[0] | {"index": 1} == texts[1]
    [by_ids, other] = _echoed(pair, prompt=[ids, ids[:4]], **asked)
    for choice in (texts[0], by_ids):
        told = choice["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert choice["finish_reason"] == "length"
        assert len(told["tokens"]) == len(ids) + n_predict
        assert {len(values) for values in told.values()} == {len(told["tokens"])}
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        expected = [row[i] for row, i in zip(logs, ids[1:], strict=False)]
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=_NEAR)
        for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert logprob <= max(top.values()) + _NEAR
        pieces = zip(told["text_offset"], told["tokens"], strict=True)
        assert all(choice["text"][at:].startswith(token) for at, token in pieces)
    assert other["logprobs"]["token_logprobs"][1:4] == pytest.approx(
        by_ids["logprobs"]["token_logprobs"][1:4], abs=_NEAR
    )
    streamed = http.post(
        pair.url + "/v1/completions",
        json={"prompt": PROMPT, "echo": True, "stream": True, **asked},
    )
    parts = [event["choices"][0] for event in _events(streamed)]
    assert "".join(part["text"] for part in parts) == texts[0]["text"]
    for name, values in texts[0]["logprobs"].items():
        found = [value for part in parts for value in (part["logprobs"] or {}).get(name) or ()]
        if name in ("tokens", "text_offset"):
            assert found == values


def test_lm_evals_loglikelihood_is_answered(pair: Program) -> None:
    file = Path(__file__).parents[1] / "fixtures" / "requests" / "lm_eval_loglikelihood.json"
    recorded = json.loads(file.read_text())
    answer = http.post(pair.url + recorded["path"], json=recorded["body"])
    assert answer.status_code == 200
    [choice] = answer.json()["choices"]
    [ids] = recorded["body"]["prompt"]
    scored = choice["logprobs"]["token_logprobs"][1 : len(ids)]
    assert all(logprob <= 0 for logprob in scored)
    assert all(choice["logprobs"]["top_logprobs"][1 : len(ids)])


def test_a_prompt_is_read_ahead_by_a_request_for_no_token(pair: Program) -> None:
    prompt = PROMPT + "    # read ahead, some words more than that\n" * 2
    body = {"prompt": prompt, "n_predict": 0}
    native = [http.post(pair.url + "/completion", json=body).json() for _ in range(2)]
    n_prompt = native[0]["tokens_evaluated"]
    assert [answer["content"] for answer in native] == ["", ""]
    assert native[1]["tokens_cached"] == n_prompt - 1
    assert native[1]["stop_type"] == "limit"
    assert native[1]["timings"]["predicted_n"] == 0
    legacy = http.post(pair.url + "/v1/completions", json={"prompt": prompt, "max_tokens": 0})
    [choice] = legacy.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert legacy.json()["usage"]["completion_tokens"] == 0
