"""The server's words about itself, from its first moment on."""

from __future__ import annotations

from fake_generator import FakeFactory
from running import StartServer, eventually, http

from specoffload.errors import UsageError


def test_while_the_model_loads_health_is_503_and_requests_are_refused(
    start_server: StartServer,
) -> None:
    server = start_server(FakeFactory(load_s=0.7), healthy=False)
    for path in ("/health", "/v1/health"):
        response = http.get(server.url + path)
        assert response.status_code == 503
        assert response.json() == {
            "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        }
    for path in ("/v1/models", "/props"):
        assert http.get(server.url + path).status_code == 503
    response = http.post(server.url + "/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    server.wait_until_healthy()
    assert http.get(server.url + "/health").json() == {"status": "ok"}
    assert any(line.startswith("model loaded: fake") for line in server.lines)


def test_props_tell_context_slots_template_and_notes(start_server: StartServer) -> None:
    server = start_server(FakeFactory(n_ctx=300))
    props = server.props()
    assert props["default_generation_settings"]["n_ctx"] == 300
    assert props["default_generation_settings"]["params"]["temperature"] == 0.0
    assert props["total_slots"] == 1
    assert props["chat_template"] == "{{ messages }}"
    assert props["notes"] == ["nothing is computed"]
    meta = http.get(server.url + "/v1/models").json()["data"][0]["meta"]
    assert meta["n_ctx"] == 300


def test_a_model_that_is_refused_ends_the_server_with_its_sentence(
    start_server: StartServer,
) -> None:
    server = start_server(FakeFactory(bad_model=True), healthy=False)
    server.wait_for_end()
    assert isinstance(server.error, UsageError)
    assert str(server.error) == "fake.gguf is not a GGUF file: it begins with b'text'"


def test_closing_while_the_model_loads_does_not_wait_for_it(start_server: StartServer) -> None:
    server = start_server(FakeFactory(load_s=60), healthy=False)
    eventually(lambda: http.get(server.url + "/health").status_code == 503)
    server.stop()
    assert server.error is None
