"""/slots as in llama-server: the state of each slot, and saving, restoring and erasing slots."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_generator import FakeFactory
from program import Program
from running import Running, StartServer, eventually, http


def act(url: str, number: int, action: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return http.post(f"{url}/slots/{number}", params={"action": action}, json=body)


def test_the_slots_are_listed_with_what_they_hold(start_server: StartServer) -> None:
    server = start_server(FakeFactory(n_parallel=3))
    slots = http.get(server.url + "/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2]
    assert [slot["n_tokens"] for slot in slots] == [0, 10, 20]
    assert {slot["n_ctx"] for slot in slots} == {512}
    assert not any(slot["is_processing"] for slot in slots)
    assert server.props()["total_slots"] == 3


def test_who_wants_a_free_slot_is_told_that_there_is_none(start_server: StartServer) -> None:
    server = start_server(FakeFactory(n_parallel=1))
    url = server.url + "/slots?fail_on_no_slot=1"
    assert http.get(url).status_code == 200
    with http.stream(
        "POST", server.url + "/v1/completions", json={"prompt": "[forever]", "stream": True}
    ):
        eventually(lambda: http.get(url).status_code == 503)
        assert http.get(server.url + "/slots").json()[0]["is_processing"]
    eventually(lambda: http.get(url).status_code == 200)


@pytest.mark.parametrize(
    ("number", "action", "body", "words"),
    [
        (0, "explode", {}, "action: Input should be 'save', 'restore' or 'erase'"),
        (0, "save", {}, "save needs a filename"),
        (0, "restore", {"filename": ""}, "restore needs a filename"),
        (9, "erase", None, "slot 9 does not exist"),
        (0, "save", {"filename": 7}, "filename"),
    ],
)
def test_what_is_wrong_with_an_action_is_a_400(
    server: Running, number: int, action: str, body: dict[str, Any] | None, words: str
) -> None:
    response = act(server.url, number, action, body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_the_result_of_an_action_has_llama_servers_names(server: Running) -> None:
    saved = act(server.url, 0, "save", {"filename": "x"}).json()
    assert saved == {
        "id_slot": 0, "filename": "x", "n_saved": 0, "n_written": 1000,
        "timings": {"save_ms": 500.0},
    }  # fmt: skip
    assert set(act(server.url, 0, "restore", {"filename": "x"}).json()) == {
        "id_slot", "filename", "n_restored", "n_read", "timings",
    }  # fmt: skip
    assert act(server.url, 0, "erase").json() == {"id_slot": 0, "n_erased": 0}


def test_a_body_in_chunks_is_read(server: Running) -> None:
    url, media = server.url + "/slots/0?action=save", {"Content-Type": "application/json"}
    chunks = iter([b'{"file', b'name": "x"}'])
    saved = http.post(url, content=chunks, headers=media)
    assert saved.request.headers["transfer-encoding"] == "chunked"
    assert (saved.status_code, saved.json()["filename"]) == (200, "x")
    refused = http.post(url, content=iter([b'{"filename": 7}']), headers=media)
    assert refused.status_code == 400
    assert http.post(server.url + "/slots/0?action=erase").status_code == 200, "no body at all"


def test_an_answer_tells_the_slot_that_it_was_made_in(pair: Program) -> None:
    body = {"prompt": "import os", "n_predict": 3, "ignore_eos": True}
    for wanted in (1, 0, -1):
        asked = {**body, "id_slot": wanted}
        whole = http.post(pair.url + "/completion", json=asked).json()
        events = http.post(pair.url + "/completion", json={**asked, "stream": True}).text
        told = [json.loads(line[6:])["id_slot"] for line in events.splitlines() if line]
        assert len(told) > 1
        for number in (whole["id_slot"], *told):
            assert number == wanted if wanted >= 0 else number in range(4)
