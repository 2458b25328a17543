"""`cache_control` of the Messages API: a hybrid model reads what comes before it only once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program import Program, serving
from running import http

MARK = {"cache_control": {"type": "ephemeral"}}
RULES = "\n".join(f"Rule {i}: the number {i * i} is square." for i in range(12))


@pytest.fixture(scope="module")
def hybrid(models: Path) -> Iterator[Program]:
    from lab.synth import write_preset

    path = models / "cache-control.gguf"
    more: dict[str, Any] = {"vocab": "bytes", "n_vocab": 512, "quant": "f32"}
    write_preset("qwen3next", path, size="tiny", seed=3, **more)
    exact = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
    flags = ("-m", str(path), "--device", "cpu", "--ctx-size", "2048", "--spec-type", "none")
    with serving(*flags, *exact) as running:
        yield running


def ask(program: Program, words: str, system: Any = RULES, **more: Any) -> tuple[str, list[int]]:
    """Return the answer's text, and the input tokens: evaluated, written to the cache, read."""
    body = {
        "model": "any",
        "max_tokens": 6,
        "system": system,
        "messages": [{"role": "user", "content": words}],
        **more,
    }
    answer = http.post(program.url + "/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    usage = told["usage"]
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return told["content"][0]["text"], [usage[kind] for kind in kinds]


def test_the_same_beginning_with_another_end_is_read_from_the_checkpoint(hybrid: Program) -> None:
    system = [{"type": "text", "text": RULES, **MARK}]
    _, (rest, n_created, n_read) = ask(hybrid, "Name a square.", system)
    assert n_created > 200
    assert (rest < 60, n_read) == (True, 0)
    text, (rest, n_new, n_read) = ask(hybrid, "Is 25 a square? Say why.", system)
    assert (n_new, n_read) == (0, n_created)
    fresh, counts = ask(hybrid, "Is 25 a square? Say why.", cache_prompt=False)
    assert counts == [rest + n_created, 0, 0]
    assert text == fresh


def test_marks_of_messages_and_of_the_whole_request(hybrid: Program) -> None:
    def turn(*words: str) -> list[dict[str, Any]]:
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(words)]

    first = turn(f"Read this: {RULES[::-1]}")
    _, (_, n_created, _) = ask(hybrid, "", messages=first, **MARK)
    assert n_created > 300
    longer = turn(first[0]["content"], "Yes.", "Again?")
    _, (_, n_more, n_read) = ask(hybrid, "", messages=longer, **MARK)
    assert n_read >= n_created
    assert n_more > 0


def test_more_marks_than_the_api_has_are_refused(hybrid: Program) -> None:
    system = [{"type": "text", "text": f"Rule {i}.", **MARK} for i in range(5)]
    body = {"model": "any", "max_tokens": 1, "system": system,
            "messages": [{"role": "user", "content": "hi"}]}  # fmt: skip
    answer = http.post(hybrid.url + "/v1/messages", json=body)
    assert answer.status_code == 400
    assert "at most 4" in answer.json()["error"]["message"]


@pytest.mark.extra("anthropic")
def test_anthropics_client_sees_what_was_read(hybrid: Program) -> None:
    anthropic = pytest.importorskip(
        "anthropic", reason="anthropic is not installed: scripts/test-extras runs this"
    )
    system: Any = [{"type": "text", "text": f"Be exact. {RULES}", **MARK}]
    found = []
    with anthropic.Anthropic(base_url=hybrid.url, api_key="none", max_retries=0) as client:
        for words in ("One?", "Two, or more?"):
            asked = {"model": "any", "max_tokens": 4, "system": system,
                     "messages": [{"role": "user", "content": words}]}  # fmt: skip
            found.append(client.messages.create(**asked).usage)
        with client.messages.stream(**asked) as stream:
            found.append(stream.get_final_message().usage)
    first, second, third = found
    assert first.cache_creation_input_tokens > 200
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens == first.cache_creation_input_tokens
    assert third.cache_read_input_tokens > second.cache_read_input_tokens
    assert second.cache_creation_input_tokens == third.cache_creation_input_tokens == 0
