"""A model whose logits are not numbers: each route answers with one sentence and no text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from program import Program, serving
from running import http

from offload.model_file import read_facts

SENTENCE = "the model's logits are not numbers, so no token can be chosen: "
ASKED = {"max_tokens": 4, "messages": [{"role": "user", "content": "Why?"}]}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A server whose model has one weight that is NaN.

    All weights are floats. ggml makes numbers of NaNs when it quantizes activations.
    """
    from lab.synth import write_preset

    path = tmp_path_factory.mktemp("damaged") / "nan.gguf"
    write_preset("mistral-large", path, size="tiny", seed=2, quant="f32")
    weight = read_facts(path).weights["output_norm.weight"].entry
    with path.open("r+b") as file:
        file.seek(weight.offset_bytes)
        file.write(b"\xff\xff\xff\x7f")  # NaN
    with serving(str(path), "--device", "cpu", "--no-warmup") as running:
        yield running


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4}),
        ("/completion", {"prompt": [1, 2, 3], "n_predict": 4, "temperature": 0.8}),
        ("/v1/chat/completions", ASKED),
        ("/v1/messages", {**ASKED, "model": "any"}),
        ("/v1/responses", {"input": "Why?", "max_output_tokens": 16}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_no_numbers_are_one_sentence_and_no_text(
    damaged: Program, route: str, body: dict[str, Any], stream: bool
) -> None:
    answer = http.post(damaged.url + route, json={**body, "stream": stream}, timeout=30)
    assert "\\u0000" not in answer.text
    assert "\0" not in answer.text
    assert answer.text.count(SENTENCE) == 1
    if not stream:
        assert answer.status_code == 500
        message = answer.json()["error"]["message"]
        assert message.startswith(SENTENCE)
        assert "\n" not in message
        return
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    for event in map(json.loads, events):
        for choice in event.get("choices", ()):
            assert not choice.get("text")
            assert not choice.get("delta", {}).get("content")
    assert http.get(damaged.url + "/health").status_code == 200
