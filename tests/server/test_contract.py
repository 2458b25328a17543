"""schemathesis derives requests from /openapi.json, and none makes the server fail."""

from __future__ import annotations

from typing import Any

import pytest
from fake_generator import FakeFactory
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from running import Running, http

schemathesis = pytest.importorskip(
    "schemathesis", reason="schemathesis is not installed: scripts/test-extras runs this"
)
pytestmark = pytest.mark.extra("schemathesis")

N_REQUESTS = 12  # requests per operation
ATTACKED = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/completion", "/completions", "/infill", "/tokenize"),
    *("/v1/chat/completions/input_tokens", "/v1/responses/input_tokens"),
    *("/detokenize", "/apply-template", "/slots/{number}", "/v1/models/{name}", "/metrics"),
}
NO_FAILURES = {501}  # 501: a clear answer that the model lacks a feature


@pytest.fixture(scope="module")
def contract() -> Any:
    running = Running(FakeFactory(n_parallel=4), has_metrics=True)
    running.wait_until_healthy()
    yield schemathesis.openapi.from_url(running.url + "/openapi.json"), running
    running.stop()


def test_the_document_names_every_route_of_the_api(server: Running) -> None:
    document = http.get(server.url + "/openapi.json").json()
    assert document["openapi"].startswith("3.")
    paths = document["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/completion", "/props"} <= set(paths)
    assert "/" not in paths
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/CompletionRequest"}
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "temperature", "stream"} <= set(fields)
    for path, operations in paths.items():
        if "post" in operations:
            assert "requestBody" in operations["post"], path


@settings(
    max_examples=N_REQUESTS,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(data=st.data())
def _run_operation(operation: Any, url: str, data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(list(schemathesis.GenerationMode)))
    case = data.draw(operation.as_strategy(generation_mode=mode))
    answer = case.call(base_url=url, timeout=30)
    assert answer.status_code < 500 or answer.status_code in NO_FAILURES, (
        case.as_curl_command(),
        answer.text,
    )
    if answer.status_code >= 400 and case.method != "HEAD":
        error = answer.json()["error"]
        assert len(error["message"]) < 2000
        assert "Traceback" not in error["message"]


def test_no_request_that_the_contract_suggests_makes_the_server_fail(contract: Any) -> None:
    schema, running = contract
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 20
    assert {operation.path for operation in operations} >= ATTACKED
    for operation in operations:
        _run_operation(operation, running.url)
    assert http.get(running.url + "/health").status_code == 200
