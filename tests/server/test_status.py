"""The server's status pages and log lines, from its start on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_generator import CHAT_TEMPLATE, FakeFactory
from running import Running, StartServer, eventually, http

from offload.notes import Note, NoteKind
from specoffload.errors import UsageError
from specoffload.server.engine import client


def test_while_the_model_loads_health_is_503_and_requests_are_refused(
    start_server: StartServer,
) -> None:
    server = start_server(FakeFactory(load_s=0.7), healthy=False)
    for path in ("/health", "/v1/health"):
        response = http.get(server.url + path)
        assert response.status_code == 503
        assert response.json()["error"] == {
            "code": 503, "message": "Loading model", "type": "unavailable_error",
        }  # fmt: skip
    eventually(lambda: http.get(server.url + "/health").json().get("progress") == 0.25)
    assert http.get(server.url + "/health").json()["step"] == "reading weights"
    assert http.get(server.url + "/props").status_code == 503
    assert http.get(server.url + "/v1/models").status_code == 503, "the name is not known"
    response = http.post(server.url + "/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    server.wait_until_healthy()
    assert http.get(server.url + "/health").json() == {"status": "ok"}
    for path in ("/health", "/v1/health"):
        head = http.head(server.url + path)
        assert (head.status_code, head.content) == (200, b"")
    assert any(line.startswith("model loaded: fake") for line in server.lines)
    http.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 3})
    eventually(lambda: any("#" in line for line in server.lines))  # written behind the answer
    (line,) = [line for line in server.lines if "#" in line]
    assert " tokens, " in line
    assert " t/s · prompt " in line


def test_the_list_of_models_does_not_wait_for_the_model(start_server: StartServer) -> None:
    """Clients such as Home Assistant set up from it, and a large model loads for minutes."""
    server = start_server(FakeFactory(load_s=0.7), healthy=False, name="fake")
    for path in ("/v1/models", "/models"):
        early = http.get(server.url + path)
        assert early.status_code == 200
        (model,) = early.json()["data"]
        assert (model["id"], model["object"], model["meta"]) == ("fake", "model", None)
        assert early.json()["models"][0]["model"] == "fake"
    one = http.get(server.url + "/v1/models/fake")
    assert (one.status_code, one.json()) == (200, model)
    assert http.get(server.url + "/v1/models/other").status_code == 404
    assert http.get(server.url + "/health").status_code == 503
    server.wait_until_healthy()
    (late,) = http.get(server.url + "/v1/models").json()["data"]
    assert late["meta"]["n_ctx"] == 512
    assert {**late, "meta": None} == model


def test_props_tell_context_slots_template_and_notes(start_server: StartServer) -> None:
    server = start_server(FakeFactory(n_ctx=300))
    props = server.props()
    assert props["default_generation_settings"]["n_ctx"] == 300
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["total_slots"] == 1
    assert props["chat_template"] == CHAT_TEMPLATE
    assert props["notes"] == ["nothing is computed"]
    meta = http.get(server.url + "/v1/models").json()["data"][0]["meta"]
    assert meta["n_ctx"] == 300


def test_a_model_that_is_refused_ends_the_server_with_its_sentence(
    start_server: StartServer,
) -> None:
    server = start_server(FakeFactory(bad_model=True), healthy=False)
    server.wait_for_end()
    assert isinstance(server.error, UsageError)
    assert str(server.error) == "fake.gguf is not a GGUF file: it begins with 'text'"


def test_closing_while_the_model_loads_does_not_wait_for_it(start_server: StartServer) -> None:
    server = start_server(FakeFactory(load_s=60), healthy=False)
    eventually(lambda: http.get(server.url + "/health").status_code == 503)
    server.stop()
    assert server.error is None


def test_props_have_what_llama_servers_page_reads(server: Running) -> None:
    props = server.props()
    params = props["default_generation_settings"]["params"]
    assert params["n_predict"] == params["max_tokens"] == params["seed"] == -1
    assert params["grammar"] == ""
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["build_info"].startswith("specoffload ")
    assert props["endpoint_metrics"] is False


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/rerank", "start llama-server as a reranker"),
        ("/v1/reranking", "/v1/embeddings"),
        ("/lora-adapters", "merge them into the model file"),
    ],
)
def test_what_is_not_served_says_why_and_what_is(server: Running, path: str, words: str) -> None:
    for answer in (http.get(server.url + path), http.post(server.url + path, json={})):
        assert answer.status_code == 501
        assert words in answer.json()["error"]["message"]


def test_metrics_are_off_until_they_are_asked_for(server: Running) -> None:
    answer = http.get(server.url + "/metrics")
    assert answer.status_code == 501
    assert answer.json()["error"]["type"] == "not_supported_error"
    assert "--metrics" in answer.json()["error"]["message"]


def test_metrics_count_answers_and_what_the_engine_copied(start_server: StartServer) -> None:
    server = start_server(has_metrics=True)

    def samples() -> dict[str, float]:
        page = http.get(server.url + "/metrics").text
        lines = [line.split() for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    assert samples()["specoffload:answers_total"] == 0
    usage = http.post(server.url + "/v1/completions", json={"prompt": "x"}).json()["usage"]
    found = samples()
    assert found["specoffload:answers_total"] == 1
    timed = "vllm:time_to_first_token_seconds_count"
    assert [value for name, value in found.items() if name.startswith(timed)] == [1]
    assert found["llamacpp:tokens_predicted_total"] == usage["completion_tokens"]
    assert found["llamacpp:prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["specoffload:internal_streamed_bytes_total"] == 1000
    assert found["specoffload:hit_rate"] == 0.75


def test_metrics_are_there_while_the_model_loads(start_server: StartServer) -> None:
    server = start_server(FakeFactory(load_s=60), healthy=False, has_metrics=True)
    assert http.get(server.url + "/metrics").status_code == 200


def test_tokens_become_text_again(server: Running) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        return http.post(server.url + path, json=body).json()

    tokens = post("/tokenize", {"content": "hé"})["tokens"]
    assert tokens == list("hé".encode())
    assert post("/detokenize", {"tokens": tokens}) == {"content": "hé"}
    assert post("/detokenize", {"tokens": []}) == {"content": ""}
    pieces = post("/tokenize", {"content": "hé", "with_pieces": True})["tokens"]
    assert pieces[0] == {"id": 104, "piece": "h"}
    assert pieces[1] == {"id": 0xC3, "piece": [0xC3]}
    for bad in ([-1], [257], "x", [1.5], None):
        assert http.post(server.url + "/detokenize", json={"tokens": bad}).status_code == 400


def test_text_longer_than_the_context_is_not_made_tokens(server: Running) -> None:
    text = "x" * (512 * 256 + 1)
    for path, body in (
        ("/tokenize", {"content": text}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = http.post(server.url + path, json=body)
        assert answer.status_code == 400, path
        assert "at least 513 tokens" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "exceed_context_size_error"
    text = "x" * (512 * 256)
    answer = http.post(server.url + "/v1/completions", json={"prompt": text})
    assert f"{512 * 256 + 1} tokens" in answer.json()["error"]["message"]


def test_the_progress_of_a_long_prompt_is_told(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(FakeFactory())
    assert http.post(server.url + "/v1/completions", json={"prompt": "[parts]"}).status_code == 200
    assert not any("prompt 2 of 8" in line for line in server.lines)  # quick prompt
    monkeypatch.setattr(client, "_SAY_PROMPT_S", 0.0)
    assert http.post(server.url + "/v1/completions", json={"prompt": "[parts]"}).status_code == 200
    for n_read in (2, 4, 6):
        line = rf"#1: prompt {n_read} of 8 tokens in \d+ s"
        assert any(re.fullmatch(line, said) for said in server.lines)


def test_notes_that_matter_to_the_operator_are_told_of(start_server: StartServer) -> None:
    """Sentences without a special kind, on --min-batch, passes and ways to copy are not.

    Warnings are no notes of a model: the server says them when it starts.
    """
    untold = {NoteKind.OTHER, NoteKind.MIN_BATCH, NoteKind.PASSES, NoteKind.COPIES}
    kinds = set(NoteKind) - untold - {NoteKind.WARNING}
    told = [Note(kind, f"a note of the kind {kind}") for kind in sorted(kinds)]
    others = [Note(kind, f"a note of the kind {kind}") for kind in sorted(untold)]
    server = start_server(FakeFactory(notes=(*told, *others)))
    assert set(told) <= set(server.lines)
    assert not set(others) & set(server.lines)


def test_another_models_name_is_logged_once_and_answered(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    with caplog.at_level("WARNING", "specoffload.server"):
        for name in ("gpt-no", "gpt-no", "fake", None):
            body = {"prompt": "x", "model": name}
            assert http.post(server.url + "/v1/completions", json=body).json()["model"] == "fake"
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a request for the model 'gpt-no' is answered by 'fake'"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/embeddings", {"input": "x"}),
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_strict_model_refuses_other_names(strict: Running, path: str, body: dict[str, Any]) -> None:
    refused = http.post(strict.url + path, json={**body, "model": "gpt-4"})
    assert refused.status_code == 404
    assert "this server has 'fake'" in refused.text
    assert http.post(strict.url + path, json={**body, "model": "fake"}).status_code != 404


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    running = Running(strict_model=True)
    running.wait_until_healthy()
    yield running
    running.stop()


def test_props_have_the_models_file(server: Running) -> None:
    assert server.props()["model_path"] == "/models/fake.gguf"
    assert server.props()["model_alias"] == "fake"
