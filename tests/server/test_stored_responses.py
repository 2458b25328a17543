"""Responses are kept, so that a client may name an earlier one, or items of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_generator import FakeFactory
from hypothesis import given
from hypothesis import strategies as st
from running import Running, RunningModels, StartServer, http

from specoffload.server.access import AccessRules
from specoffload.server.api import whole_input
from specoffload.server.api.stored import StoredResponses
from specoffload.server.engine.messages import RequestFailed

FIRST = {"role": "user", "content": [{"type": "input_text", "text": "[say]one[/say]"}]}
THEN = {"role": "user", "content": "go on"}


def _ask(server: Running, asked: Any, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = server.url + "/v1/responses"
    body = {"input": asked, "max_output_tokens": 400, **fields}
    return http.post(url, json=body, headers=headers)


def _text(answer: httpx.Response) -> str:
    """The text of an answer. The fake tells the conversation that it was asked."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["output"][-1]["content"][0]["text"])


def _whole(first: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": "hi"}, *first["output"], THEN]


@pytest.mark.parametrize("typed", [True, False])
def test_an_item_that_is_named_is_read_as_if_it_was_sent(server: Running, typed: bool) -> None:
    """AI SDK sends its second turn so."""
    first = _ask(server, [{"role": "user", "content": "hi"}]).json()
    assert first["store"] is True
    named = {"id": first["output"][-1]["id"]} | ({"type": "item_reference"} if typed else {})
    again = _ask(server, [{"role": "user", "content": "hi"}, named, THEN])
    assert _text(again) == _text(_ask(server, _whole(first), store=False))
    assert "assistant: user: hi" in _text(again)


def test_a_response_that_is_named_has_the_whole_conversation(server: Running) -> None:
    first = _ask(server, "hi").json()
    second = _ask(server, [THEN], previous_response_id=first["id"])
    assert second.json()["previous_response_id"] == first["id"]
    assert _text(second) == _text(_ask(server, _whole(first), store=False))
    third = _ask(server, "more", previous_response_id=second.json()["id"])
    whole = [*_whole(first), *second.json()["output"], {"role": "user", "content": "more"}]
    assert _text(third) == _text(_ask(server, whole, store=False))
    counted = http.post(
        server.url + "/v1/responses/input_tokens",
        json={"input": "more", "previous_response_id": second.json()["id"]},
    )
    assert counted.json()["input_tokens"] == third.json()["usage"]["input_tokens"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "document", "source": {"type": "text", "data": "needle"}},
        {"type": "search_result", "content": [{"type": "text", "text": "needle"}]},
        {"type": "note", "text": "needle"},
    ],
)
def test_a_response_that_is_named_has_the_text_of_foreign_parts(
    server: Running, part: dict[str, Any]
) -> None:
    asked = {"role": "user", "content": [part, {"type": "input_text", "text": "?"}]}
    first = _ask(server, [asked]).json()
    second = _ask(server, [THEN], previous_response_id=first["id"])
    whole = _ask(server, [asked, *first["output"], THEN], store=False)
    assert _text(second) == _text(whole)
    assert "user: needle" in _text(second)


def test_instructions_belong_to_one_request_only(server: Running) -> None:
    first = _ask(server, "hi", instructions="Be brief.").json()
    assert "Be brief." not in _text(_ask(server, [THEN], previous_response_id=first["id"])).replace(
        first["output"][0]["content"][0]["text"], ""
    )


def test_the_response_of_a_stream_is_kept_too(server: Running) -> None:
    text = _ask(server, "hi", stream=True).text
    last = json.loads(text.split("data: ")[-1])["response"]
    assert last["store"] is True
    kept = http.get(f"{server.url}/v1/responses/{last['id']}")
    assert kept.json() == last
    named = {"type": "item_reference", "id": last["output"][0]["id"]}
    assert _ask(server, [named, THEN]).status_code == 200


def test_a_call_that_is_named_goes_with_its_result(server: Running) -> None:
    stored = StoredResponses()
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
    stored.keep("", {"id": "resp_1", "output": [call]}, [b'{"role": "user", "content": "?"}'], None)
    result = {"type": "function_call_output", "call_id": "c", "output": "3"}
    asked = whole_input.ResponsesRequest.model_validate(
        {"input": [result], "previous_response_id": "resp_1"}
    )
    whole, own = whole_input.whole_request(stored, "", asked, 10**6)
    assert own is not None
    chat, _ = whole_input_as_chat(whole)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool"]


def whole_input_as_chat(request: Any) -> Any:
    from specoffload.server.api.response_input import as_chat

    return as_chat(request)


def test_nothing_is_kept_of_a_request_with_store_false(server: Running) -> None:
    first = _ask(server, "hi", store=False).json()
    assert first["store"] is False
    for asked in (
        {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}]},
        {"input": "x", "previous_response_id": first["id"]},
    ):
        answer = http.post(server.url + "/v1/responses", json=asked)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert "store: false" in error["message"]
        assert "send the whole input" in error["message"]
        if "previous_response_id" in asked:
            assert error["code"] == "previous_response_not_found"
    assert http.get(f"{server.url}/v1/responses/{first['id']}").status_code == 404


def test_a_reference_without_an_id_and_a_foreign_id_are_refused(server: Running) -> None:
    for item in ({"type": "item_reference"}, {"type": "item_reference", "id": "msg_x"}):
        answer = _ask(server, [THEN, item])
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("input[1]: ")


def test_a_response_can_be_deleted(server: Running) -> None:
    first = _ask(server, "hi").json()
    url = f"{server.url}/v1/responses/{first['id']}"
    told = {"id": first["id"], "object": "response", "deleted": True}
    assert http.delete(url).json() == told
    assert http.delete(url).status_code == http.get(url).status_code == 404
    assert _ask(server, "x", previous_response_id=first["id"]).status_code == 400


def test_each_key_has_its_own_responses(start_server: StartServer) -> None:
    server = start_server(access=AccessRules(keys=("a", "b")))
    first = _ask(server, "hi", "a").json()
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert _ask(server, [item, THEN], "a").status_code == 200
    assert _ask(server, "x", "a", previous_response_id=first["id"]).status_code == 200
    assert _ask(server, [item, THEN], "b").status_code == 400
    assert _ask(server, "x", "b", previous_response_id=first["id"]).status_code == 400
    url = f"{server.url}/v1/responses/{first['id']}"
    assert http.get(url).status_code == 401
    assert http.get(url, headers={"Authorization": "Bearer b"}).status_code == 404
    assert http.delete(url, headers={"Authorization": "Bearer b"}).status_code == 404
    assert http.get(url, headers={"Authorization": "Bearer a"}).json() == first


@pytest.fixture
def models() -> Iterator[RunningModels]:
    server = RunningModels({name: FakeFactory(name=name) for name in ("one", "two")})
    yield server
    server.stop()


def test_a_conversation_goes_on_with_another_model(models: RunningModels) -> None:
    """The first model is closed when the second one is loaded."""
    first = _ask(models, "hi", model="one").json()
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    named = _ask(models, [{"role": "user", "content": "hi"}, item, THEN], model="two")
    after = _ask(models, [THEN], model="one", previous_response_id=first["id"])
    assert _text(named) == _text(after)
    assert http.get(f"{models.url}/v1/responses/{first['id']}").json() == first


# ---- limits


def _response(number: int, n_bytes: int) -> dict[str, Any]:
    text = "x" * n_bytes
    item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": text}
    return {"id": f"resp_{number}", "output": [item]}


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3000)), max_size=40),
    st.integers(1, 8),
    st.integers(2000, 30_000),
)
def test_number_and_size_stay_within_their_limits(
    kept: list[tuple[str, int]], most: int, most_bytes: int
) -> None:
    stored = StoredResponses(most=most, most_bytes=most_bytes)
    for number, (owner, n_bytes) in enumerate(kept):
        stored.keep(owner, _response(number, n_bytes), [b"{}"], None)
        assert len(stored) <= most
        assert stored.n_bytes <= most_bytes
    for number, (owner, _) in enumerate(kept):  # an item is there if and only if its response is
        there = []
        for ask in (
            lambda n=number, o=owner: stored.item(o, "input[0]", f"msg_{n}"),
            lambda n=number, o=owner: stored.response(o, f"resp_{n}"),
        ):
            try:
                there.append(bool(ask()))
            except RequestFailed:
                there.append(False)
        assert there[0] == there[1]


def test_one_key_does_not_push_out_the_responses_of_another() -> None:
    stored = StoredResponses(most=1000, most_bytes=100_000)
    stored.keep("quiet", _response(0, 10), [], None)
    for number in range(1, 300):
        stored.keep("busy", _response(number, 2000), [], None)
    assert stored.response("quiet", "resp_0")
    assert stored.n_bytes <= 100_000


def test_old_responses_are_forgotten_and_used_ones_are_not() -> None:
    now_s = 0.0
    stored = StoredResponses(kept_s=10.0, now=lambda: now_s)
    stored.keep("", _response(0, 1), [], None)
    stored.keep("", _response(1, 1), [b"{}"], "resp_0")
    stored.keep("", _response(2, 1), [], None)
    now_s = 8.0
    assert len(stored.conversation("", "resp_1")) == 3
    now_s = 15.0
    assert stored.item("", "input[0]", "msg_0")
    with pytest.raises(RequestFailed):
        stored.item("", "input[0]", "msg_2")
    now_s = 26.0
    with pytest.raises(RequestFailed):
        stored.conversation("", "resp_1")
    assert (len(stored), stored.n_bytes) == (0, 0)


def test_a_small_request_does_not_become_a_large_one() -> None:
    """One item may be named many times."""
    stored = StoredResponses()
    stored.keep("", _response(0, 10_000), [], None)
    item = {"type": "item_reference", "id": "msg_0"}
    asked = whole_input.ResponsesRequest.model_validate({"input": [item] * 1000})
    with pytest.raises(RequestFailed) as refused:
        whole_input.whole_request(stored, "", asked, 10**6)
    assert refused.value.problem.http_status == 413


def test_an_input_that_is_too_large_is_answered_and_not_kept() -> None:
    stored = StoredResponses()
    asked = whole_input.ResponsesRequest.model_validate({"input": "x" * (9 * 2**20)})
    whole, own = whole_input.whole_request(stored, "", asked, 64 * 2**20)
    assert (whole, own) == (asked, None)
