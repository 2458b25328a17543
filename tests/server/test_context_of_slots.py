"""A server with `--no-kv-unified` tells and enforces the context of each slot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from program import Program, serving
from running import http

N_SLOTS, N_EACH = 3, 512


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    flags = ("--device", "cpu", "-c", str(N_SLOTS * N_EACH), "-np", str(N_SLOTS))
    with serving(*flags, "--no-kv-unified", "--metrics") as running:
        yield running


def test_the_context_that_is_told_is_that_of_a_slot(program: Program) -> None:
    props = http.get(program.url + "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == N_EACH
    assert props["total_slots"] == N_SLOTS
    slots = http.get(program.url + "/slots").json()
    assert [slot["n_ctx"] for slot in slots] == [N_EACH] * N_SLOTS


def test_a_prompt_longer_than_a_slot_is_refused(program: Program) -> None:
    body = {"prompt": [5] * N_EACH, "n_predict": 1}
    refused = http.post(program.url + "/completion", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (N_EACH, N_EACH)


def test_all_slots_may_be_full_at_once(program: Program) -> None:
    """Together they hold as many tokens as the whole context has."""

    def ask(number: int) -> int:
        body = {
            "prompt": [5 + number] * (N_EACH - 40), "n_predict": N_EACH, "ignore_eos": True,
            "id_slot": number,
        }  # fmt: skip
        answer = http.post(program.url + "/completion", json=body, timeout=60).json()
        return int(answer["tokens_predicted"])

    with ThreadPoolExecutor(N_SLOTS) as clients:
        assert set(clients.map(ask, range(N_SLOTS))) == {40}
    metrics = http.get(program.url + "/metrics").text
    found = re.search(r"^specoffload:internal_idle_cells_read\S* (\S+)$", metrics, re.M)
    assert found is not None
    assert float(found[1]) == 0
