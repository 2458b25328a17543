"""What fails inside a split layer ends the requests of that step with one sentence; the engine
process goes on, and the next answer is the right one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Running, http
from split_faults import FAULTS, FaultyFactory

BODY = {"prompt": "def f(x):\n", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
MESSAGES = {"cpu": "on the CPU failed with ggml status -1", "device": "status", "copy": "link is"}


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "fault"
    path.write_text("", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def split(fault: Path) -> Iterator[Running]:
    running = Running(FaultyFactory(fault), has_metrics=True)
    running.wait_until_healthy()
    yield running
    running.stop()


def text_of(server: Running) -> str:
    answer = http.post(server.url + "/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def counted(server: Running, name: str) -> float:
    lines = http.get(server.url + "/metrics").text.splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"specoffload:{name}_total "))
    return float(value)


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_in_a_split_layer_is_a_500_and_the_next_answer_is_right(
    split: Running, fault: Path, what: str
) -> None:
    expected = text_of(split)
    assert len(expected) > 8
    for name in ("n_pairs_hit", "n_pairs_streamed", "n_pairs_host"):
        assert counted(split, name) > 0
    fault.write_text(what, encoding="utf-8")
    try:
        answer = http.post(split.url + "/v1/completions", json=BODY | {"cache_prompt": False})
    finally:
        fault.write_text("", encoding="utf-8")
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert MESSAGES[what] in error["message"]
    assert "\n" not in error["message"]
    assert text_of(split) == expected
    assert split.props()["engine_restarts"] == 0
