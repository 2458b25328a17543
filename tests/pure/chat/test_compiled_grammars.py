"""A grammar is compiled once for all who send it, and Python goes on meanwhile."""

from __future__ import annotations

import json
import threading
import time

import pytest
from byte_grammars import Bytes

from offload.errors import BadRequest
from offload.ggml.compiled_grammars import CompiledGrammars, GivenGrammar
from offload.sampling.grammar import Grammar, GrammarTokens, grammar_of


@pytest.fixture
def tokens() -> GrammarTokens:
    return GrammarTokens(Bytes())


class _Compiler:
    """Gives grammars, and counts how many it compiled."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self._tokens, self._kept = tokens, CompiledGrammars()
        self.n_compiled = 0

    def made(self, *words: str | None) -> Grammar:
        given = GivenGrammar(*words)  # type: ignore[arg-type]
        return self._kept.of(given, lambda: self._compiled(given))

    def _compiled(self, given: GivenGrammar) -> Grammar:
        self.n_compiled += 1
        made = grammar_of(lambda: self._tokens, *given)
        assert made is not None
        return made


@pytest.fixture
def compiler(tokens: GrammarTokens) -> _Compiler:
    return _Compiler(tokens)


def test_answers_with_one_grammar_share_what_was_compiled_and_nothing_else(
    compiler: _Compiler,
) -> None:
    schema = json.dumps({"enum": ["ab", "cd"]})
    first, second, third = (compiler.made(None, schema) for _ in range(3))
    assert compiler.n_compiled == 1
    for text, one in ((b'"ab', first), (b'"cd', second)):
        for byte in text:
            one.accept(byte)
    assert first.allowed().nonzero() == second.allowed().nonzero() == (ord('"'),)
    assert third.allowed().nonzero()[0].tolist() == [ord('"')]
    assert not third.allows(ord("a"))


def test_grammars_that_differ_in_their_first_rule_are_two(compiler: _Compiler) -> None:
    gbnf = 'root ::= "a"\nother ::= "b"'
    one, two = compiler.made(gbnf, None), compiler.made(gbnf, None, "other")
    assert [one.allows(byte) for byte in b"ab"] == [True, False]
    assert [two.allows(byte) for byte in b"ab"] == [False, True]
    assert compiler.n_compiled == 2


@pytest.mark.parametrize(
    ("gbnf", "schema"), [("root ::= nothing", None), (None, '{"pattern": "("}')]
)
def test_an_error_is_found_once(compiler: _Compiler, gbnf: str | None, schema: str | None) -> None:
    said = []
    for _ in range(2):
        with pytest.raises(BadRequest) as error:
            compiler.made(gbnf, schema)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert compiler.n_compiled == 1


def _put(kept: CompiledGrammars, name: str, took_s: float) -> GivenGrammar:
    given = GivenGrammar(name, None)
    kept.put(given, BadRequest(name), took_s)
    return given


def test_grammars_that_took_long_leave_first_but_the_last_four_stay() -> None:
    kept = CompiledGrammars()
    small = [_put(kept, f"s{i}", 0.001) for i in range(20)]
    assert all(given in kept for given in small)
    large = [_put(kept, f"l{i}", 1.0) for i in range(6)]
    assert [given in kept for given in large] == [False, False, True, True, True, True]
    assert len(kept) == 4


def test_a_grammar_that_is_asked_for_again_stays() -> None:
    kept = CompiledGrammars()
    first = _put(kept, "first", 0.0)
    for i in range(100):
        _put(kept, f"{i}", 0.0)
        with pytest.raises(BadRequest, match="first"):
            kept.of(first, pytest.fail)
    assert len(kept) == 32


def test_python_goes_on_while_a_large_grammar_is_compiled(tokens: GrammarTokens) -> None:
    """Otherwise a thread of its own would not help."""
    properties = {f"p{k}": {"enum": [f"v{j}_{k}" for j in range(5)]} for k in range(1500)}
    schema = json.dumps({"type": "object", "properties": properties})
    began_s = time.monotonic()
    thread = threading.Thread(target=grammar_of, args=(lambda: tokens, None, schema))
    thread.start()
    longest_s, last_s = 0.0, began_s
    while thread.is_alive():
        time.sleep(0.001)
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert longest_s < (last_s - began_s) / 2
