"""Grammars and schemas made to stall a server are answered, and so is the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from lab.attack.client import N_TOKENS, Answer, ask_for, decided_texts, send, text_of
from lab.attack.grammars import HOSTILE_GRAMMARS, HOSTILE_SCHEMAS
from lab.attack.program import Program, bad_lines, serving

FLAGS = ("--device", "cpu", "-t", "1", "-np", "2", "-c", "1024", "--temp", "0")
_MOST_KEPT_BYTES = 150 << 20  # of compiled grammars, about 100 MB, and of what glibc holds back
_MOST_GROWTH = 1.15  # from one time all of them were asked for to the next
_MOST_OTHERS = 4  # renderers, one of them in reserve, and multiprocessing's own process
_MOST_OTHER_BYTES = 128 << 20


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with serving(tmp_path_factory.mktemp("hostile") / "log", FLAGS) as started:
        yield started


def ask(program: Program, **field: Any) -> Answer:
    """Ask for a completion with these fields. Raises NoAnswer after 30 s."""
    body = {"prompt": "a", "max_tokens": 4, **field}
    return asyncio.run(send(program.port, ask_for("/v1/completions", body)))


def engine_bytes(program: Program) -> int:
    engine = program.engine()
    assert engine is not None
    return int(engine.memory_info().rss)


def check(answer: Answer) -> None:
    assert answer.status in (200, 400), answer.body[:500]
    if answer.status == 400:
        message = answer.json()["error"]["message"]
        assert len(message) < 1000
        assert "Traceback" not in message


def ask_all(program: Program) -> Iterator[None]:
    """Ask for each grammar and each schema. Yields after each schema."""
    for grammar in HOSTILE_GRAMMARS.values():
        check(ask(program, grammar=grammar))
    for schema in HOSTILE_SCHEMAS.values():
        wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        check(ask(program, response_format=wrapped))
        yield


def test_each_is_answered_and_the_next_request_is_served(program: Program) -> None:
    """The engine keeps a limited number of bytes of grammars, and asking again adds nothing.

    Renderers do not become more and more.
    """
    prompt, before = next(iter(asyncio.run(decided_texts(program.port)).items()))
    check(ask(program, grammar='root ::= "a"?'))
    check(ask(program, json_schema={"type": "string", "pattern": "^a{500000000}$"}))
    first_bytes = engine_bytes(program)
    for _ in ask_all(program):
        assert asyncio.run(text_of(program.port, prompt, N_TOKENS)) == before
    once_bytes = engine_bytes(program)
    assert once_bytes < first_bytes + _MOST_KEPT_BYTES
    for _ in ask_all(program):
        pass
    assert engine_bytes(program) < _MOST_GROWTH * once_bytes
    others = [part for part in program.parts()[1:] if part != program.engine()]
    assert len(others) <= _MOST_OTHERS
    assert max(part.memory_info().rss for part in others) < _MOST_OTHER_BYTES
    assert bad_lines(program.said()) == []
    assert "restarting" not in program.said()
