"""Embeddings over HTTP: states of a causal model, pooled by libllama and averaged by numpy."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from program import Program, serving
from resolved import config_of, line_of
from running import http

from lab.options import engine_options
from lab.synth import write_preset
from offload.engine import Engine, open_engine
from offload.errors import BadModel, BadRequest, DoesNotFit, NotSupported
from offload.times.context_memory import OWN, OWN_REQUIRED
from specoffload.config.options import ServeOptions
from specoffload.config.resolution import for_serving
from specoffload.session.session import Session

TEXTS = ["def fibonacci(n):", "import os", "naïve 日本語"]
Rows = NDArray[np.float32]


@pytest.fixture(scope="module")
def program(tiny_dense: Path) -> Iterator[Program]:
    flags = ("--embeddings", "--pooling", "mean", "--ubatch-size", "64")
    with serving("--model", str(tiny_dense), "--device", "cpu", *flags) as running:
        yield running


def _opened(model: Path, pooling: str, device: str = "cpu") -> Engine:
    return open_engine(
        model, engine_options(device=device, n_ctx=512, n_ubatch=64, pooling=pooling)
    )


@pytest.fixture(scope="module")
def states(tiny_dense: Path) -> dict[str, Rows]:
    """The states of each text's tokens, [n, width], without pooling."""
    with _opened(tiny_dense, "none") as engine:
        assert engine.opened.embedder is not None
        tokens = {t: engine.tokenize(t, add_special=True, parse_special=True) for t in TEXTS}
        return {text: engine.opened.embedder.embed(ids) for text, ids in tokens.items()}


def _mean(rows: Rows) -> Rows:
    mean = rows.mean(0)
    found: Rows = mean / np.linalg.norm(mean)
    return found


def test_openais_client_gets_numpys_mean_of_the_states(
    program: Program, states: dict[str, Rows]
) -> None:
    with program.client() as client:
        answer = client.embeddings.create(model="any", input=TEXTS)  # base64, by default
        plain = client.embeddings.create(model="any", input=TEXTS, encoding_format="float")
        single = client.embeddings.create(model="any", input=TEXTS[1])
    for at, text in enumerate(TEXTS):
        found = np.array(answer.data[at].embedding)
        assert answer.data[at].index == at
        assert found == pytest.approx(_mean(states[text]), abs=2e-3)
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-5)
        assert plain.data[at].embedding == pytest.approx(found, abs=1e-6)
    assert single.data[0].embedding == answer.data[1].embedding
    assert answer.usage.prompt_tokens == sum(len(rows) for rows in states.values())
    assert answer.object == "list"


def test_tokens_are_taken_as_they_are_and_dimensions_cut(program: Program) -> None:
    body = {"content": TEXTS[0], "add_special": True}
    tokens = http.post(program.url + "/tokenize", json=body).json()["tokens"]
    with program.client() as client:
        [text, ids] = [
            client.embeddings.create(model="any", input=given).data[0].embedding
            for given in (TEXTS[0], tokens)
        ]
        several = client.embeddings.create(model="any", input=[tokens, tokens[:2]])
        cut = client.embeddings.create(model="any", input=tokens, dimensions=8)
    assert ids == text
    assert several.data[0].embedding == text
    assert several.usage.prompt_tokens == len(tokens) + 2
    head = np.array(text[:8])
    assert cut.data[0].embedding == pytest.approx(head / np.linalg.norm(head), abs=1e-6)


def test_llama_servers_own_form_of_it(program: Program, states: dict[str, Rows]) -> None:
    for path in ("/embedding", "/embeddings"):
        [one] = http.post(program.url + path, json={"content": TEXTS[0]}).json()
        assert one["index"] == 0
        [row] = one["embedding"]
        assert row == pytest.approx(_mean(states[TEXTS[0]]), abs=2e-3)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": []}, "empty"),
        ({"input": [""]}, "empty"),
        ({"input": ["x", ""]}, "input[1]: the prompt is empty"),
        ({"input": "x", "dimensions": 10**6}, "dimensions 1000000: this model's vectors have"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": [-1]}, "is token -1"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "word " * 100}, "at most 64 are read at once; raise --ubatch-size"),
    ],
)
def test_what_cannot_be_embedded_is_a_400(
    program: Program, body: dict[str, Any], words: str
) -> None:
    answer = http.post(program.url + "/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_text_is_generated_beside_it_and_base64_is_little_endian_floats(program: Program) -> None:
    body = {"input": "x", "encoding_format": "base64"}
    found = http.post(program.url + "/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert np.linalg.norm(np.frombuffer(base64.b64decode(found), "<f4")) == pytest.approx(1, 1e-4)
    with program.client() as client:
        answer = client.completions.create(model="any", prompt="x", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


@pytest.mark.parametrize("pooling", ["last", "cls"])
def test_other_poolings_take_one_of_the_states(
    tiny_dense: Path, states: dict[str, Rows], pooling: str
) -> None:
    with _opened(tiny_dense, pooling) as engine:
        assert engine.opened.embedder is not None
        tokens = engine.tokenize(TEXTS[0], add_special=True, parse_special=True)
        [found] = engine.opened.embedder.embed(tokens)
        [again] = engine.opened.embedder.embed(tokens)  # the first call leaves no state
    assert found == pytest.approx(states[TEXTS[0]][-1 if pooling == "last" else 0], abs=2e-2)
    assert (found == again).all()


def test_streamed_weights_make_the_same_embeddings(tiny_moe: Path) -> None:
    found = []
    for device in ("cpu", "sim"):
        with _opened(tiny_moe, "mean", device) as engine:
            assert engine.opened.embedder is not None
            tokens = engine.tokenize(TEXTS[0] * 3, add_special=True, parse_special=True)
            engine.sequences.extend(0, tokens[:5])
            found.append(engine.opened.embedder.embed(tokens)[0])
            engine.sequences.extend(0, tokens[5:9])
            assert engine.counters().streamed_bytes > 0 or device == "cpu"
            with pytest.raises(DoesNotFit, match="at most 64"):
                engine.opened.embedder.embed([1] * 65)
    assert found[0] == pytest.approx(found[1], abs=2e-2)


def test_a_file_that_names_a_pooling_needs_no_flag_and_another_is_a_501_that_says_why(
    models: Path, tiny_dense: Path
) -> None:
    own = models / "pooled.gguf"
    write_preset("mistral-large", own, size="tiny", seed=2, metadata={"pooling_type": 3})
    serve = for_serving(config_of(model=own, device="cpu", ctx_size=512), ServeOptions())
    with Session(serve) as session:
        rows, is_pooled = session.embed([1, 2, 3])
        assert is_pooled
        assert rows.shape[0] == 1
    plain = for_serving(config_of(model=tiny_dense, device="cpu", ctx_size=512), ServeOptions())
    with Session(plain) as session, pytest.raises(NotSupported, match="names no pooling"):
        session.embed([1, 2, 3])


def test_an_encoder_alone_is_refused_in_one_sentence(models: Path) -> None:
    encoder = models / "encoder.gguf"
    causal = {"attention.causal": False, "pooling_type": 1}
    write_preset("mistral-large", encoder, size="tiny", seed=2, metadata=causal)
    with pytest.raises(BadModel, match="reads texts in both directions"):
        _opened(encoder, "mean")


def test_without_pooling_tokens_have_vectors_of_their_own(tiny_dense: Path) -> None:
    with serving("--model", str(tiny_dense), "--device", "cpu", "--pooling", "none") as running:
        [one] = http.post(running.url + "/embedding", json={"content": TEXTS[0]}).json()
        assert len(one["embedding"]) > 5
        with running.client() as client, pytest.raises(openai.BadRequestError, match="--pooling"):
            client.embeddings.create(model="any", input="x")


def test_embeddings_of_a_model_without_pooling_are_refused_at_the_start(
    models: Path, tiny_dense: Path
) -> None:
    """The file's own pooling may be missing, or it may be none (0)."""
    none = models / "pooling-none.gguf"
    write_preset("mistral-large", none, size="tiny", seed=2, metadata={"pooling_type": 0})
    for model in (tiny_dense, none):
        words = rf"^--embeddings: {model.name} names no pooling, .* --pooling mean or last"
        with pytest.raises(BadRequest, match=words):
            _opened(model, OWN_REQUIRED)
    given = ("-m", str(tiny_dense), "--device", "cpu", "--embeddings", "--port", "0")
    ended = subprocess.run(
        [sys.executable, "-m", "specoffload", "serve", *given], capture_output=True, text=True
    )
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if "pooling" in line]
    assert len(said) == 1
    assert "Traceback" not in ended.stderr


def test_flags_of_llama_server_choose_it() -> None:
    def pooling(*words: str) -> str | None:
        own = line_of(*words, command="serve").of(ServeOptions)
        return for_serving(config_of(), own).pooling

    assert pooling() == OWN
    assert pooling("--embedding") == OWN_REQUIRED
    assert pooling("--embeddings", "--pooling", "last") == "last"
    assert pooling("--pooling", "cls") == "cls"
    auto = line_of("-np", "-1", command="serve").of(ServeOptions)
    assert for_serving(config_of(), auto).parallel == 4


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding"])
def test_a_text_that_is_too_long_is_recognised(program: Program, path: str) -> None:
    """LiteLLM and agents look for the phrase, the code and both numbers."""
    field = "input" if path == "/v1/embeddings" else "content"
    answer = http.post(program.url + path, json={field: "word " * 100})
    error = answer.json()["error"]
    assert answer.status_code == 400
    n_tokens = error["n_prompt_tokens"]
    assert (n_tokens > 64, error["n_ctx"]) == (True, 64)
    assert f"request ({n_tokens} tokens) exceeds the available context size (64" in error["message"]
    assert error["type"] == "exceed_context_size_error"
    assert error["code"] == ("context_length_exceeded" if path == "/v1/embeddings" else 400)
