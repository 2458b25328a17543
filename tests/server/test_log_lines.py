"""What a server says to whoever runs it, request by request."""

from __future__ import annotations

import re

import httpx
import pytest
from fake_generator import FakeFactory
from running import Running, StartServer, eventually, http

from specoffload.server.api.answers import timings_of
from specoffload.server.engine import client
from specoffload.session.statistics import GenerationStats


def _said(server: Running, pattern: str) -> bool:
    return any(re.fullmatch(pattern, line) for line in server.lines)


def _leave(server: Running, prompt: str) -> None:
    """Hang up when the first piece of a stream has come."""
    body = {"prompt": prompt, "stream": True}
    with http.stream("POST", server.url + "/v1/completions", json=body) as response:
        next(response.iter_lines())


def test_an_answer_that_its_client_left_has_a_line(start_server: StartServer) -> None:
    server = start_server(FakeFactory())
    _leave(server, "[forever]")
    line = r"#\d+: cancelled, since the client has gone, after \d+ tokens in \d+\.\d s"
    eventually(lambda: _said(server, line))


def test_a_client_that_leaves_the_queue_has_a_line(start_server: StartServer) -> None:
    server = start_server(FakeFactory())
    body = {"prompt": "[forever]", "stream": True}
    with http.stream("POST", server.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # httpx closes the response with it
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            http.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=0.3)
        line = r"#\d+: cancelled, since the client has gone, while it waited in the queue"
        eventually(lambda: _said(server, line))


def test_the_progress_of_a_long_prompt_is_told(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(FakeFactory())
    assert http.post(server.url + "/v1/completions", json={"prompt": "[parts]"}).status_code == 200
    assert not any("prompt 2 of 8" in line for line in server.lines)  # it was quick
    monkeypatch.setattr(client, "_SAY_PROMPT_S", 0.0)
    assert http.post(server.url + "/v1/completions", json={"prompt": "[parts]"}).status_code == 200
    for n_read in (2, 4, 6):
        assert _said(server, rf"#1: prompt {n_read} of 8 tokens in \d+ s")


def test_the_speed_of_a_prompt_is_that_of_the_tokens_that_were_computed() -> None:
    """The last token of a prompt is decoded with the answer's first step, and timed there."""
    held = timings_of(GenerationStats(n_prompt_tokens=1000, n_cached_tokens=999, prefill_s=24e-6))
    names = ("prompt_n", "prompt_per_second", "prompt_per_token_ms")
    assert [held[name] for name in names] == [1, 0.0, 0.0]
    read = timings_of(GenerationStats(n_prompt_tokens=1001, n_cached_tokens=500, prefill_s=5.0))
    assert [read[name] for name in names] == [501, 100.0, 10.0]


def test_notes_that_matter_to_the_operator_are_told_of(start_server: StartServer) -> None:
    """For example in a read-only container, where each start measures again."""
    kept = ("device cpu: ...", "the profile was not stored: set SPECOFFLOAD_PROFILE_DIR")
    server = start_server(FakeFactory(notes=(*kept, "nothing is computed")))
    assert set(kept) <= set(server.lines)
    assert "nothing is computed" not in server.lines
