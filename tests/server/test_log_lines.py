"""What a server says to whoever runs it, request by request."""

from __future__ import annotations

import re

import pytest
from fake_generator import FakeFactory
from running import StartServer, http

from specoffload.server.api.answers import timings_of
from specoffload.server.engine import client
from specoffload.session.statistics import GenerationStats


def test_the_progress_of_a_long_prompt_is_told(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(FakeFactory())
    assert http.post(server.url + "/v1/completions", json={"prompt": "[parts]"}).status_code == 200
    assert not any("prompt 2 of 8" in line for line in server.lines)  # it was quick
    monkeypatch.setattr(client, "_SAY_PROMPT_S", 0.0)
    assert http.post(server.url + "/v1/completions", json={"prompt": "[parts]"}).status_code == 200
    for n_read in (2, 4, 6):
        line = rf"#1: prompt {n_read} of 8 tokens in \d+ s"
        assert any(re.fullmatch(line, said) for said in server.lines)


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
