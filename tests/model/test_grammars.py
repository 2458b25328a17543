"""Grammars and JSON schemas mean the same as in llama.cpp. test_hostile_grammars.py has attacks."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from contextlib import closing
from weakref import WeakKeyDictionary

import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from resolved import config_of

from offload.errors import BadRequest
from offload.ggml import sampler
from offload.ggml.sampler import grammar_tokens
from offload.sampling.grammar import _LIMITS, Grammar, GrammarTokens, GrammarVocabulary, grammar_of
from specoffload.config.speculation import NO_DRAFTS
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

TOKEN = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(config_of(device="cpu", threads=1, ctx_size=512, spec=NO_DRAFTS)) as opened:
        yield opened


def grammar(session: Session, gbnf: str | None = None, schema: object = None) -> Grammar:
    text = schema if isinstance(schema, str) or schema is None else json.dumps(schema)
    found = grammar_of(lambda: grammar_tokens(session.target.model), gbnf, text)
    assert found is not None
    return found


def takes(session: Session, text: str, gbnf: str | None = None, schema: object = None) -> bool:
    """True if `text` is a whole sentence of the language."""
    followed = grammar(session, gbnf, schema)
    for token in session.tokenize(text, add_special=False, parse_special=False):
        if not followed.allows(token):
            return False
        followed.accept(token)
    return followed.allows(session.target.model.ends[0])


# -- the language of llama.cpp ---------------------------------------------------------------------


class LlamaGrammar:
    """libllama's own sampler of the same grammar. It is slow and has no limits."""

    def __init__(self, session: Session, gbnf: str) -> None:
        vocab = llama_cpp.llama_model_get_vocab(session.target.model.handle)
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocab, gbnf.encode(), b"root")
        self._n_vocab = session.target.n_vocab
        assert self._sampler

    def allowed(self) -> NDArray[np.bool_]:
        row = np.zeros(self._n_vocab, TOKEN)
        row["id"], row["logit"] = np.arange(self._n_vocab), 1.0
        data = ctypes.cast(row.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data, self._n_vocab, -1, False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return np.asarray(row["logit"] != -np.inf)

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._sampler)


def is_text(piece: bytes) -> bool:
    """True if `piece` is whole characters without NUL, which llama.cpp's grammars never allow."""
    try:
        return "\0" not in piece.decode()
    except UnicodeDecodeError:
        return False


def assert_same_masks(session: Session, gbnf: str, seed: int, n_steps: int = 12) -> None:
    """Check that both allow the same tokens along a random walk.

    Only tokens of whole characters are compared. For parts of characters llama.cpp differs: it
    allows some that begin no character of the grammar, and forbids some that begin one next to a
    forbidden character.
    """
    rng = np.random.default_rng(seed)
    ours = grammar(session, gbnf)
    model = session.target.model
    whole = np.array([is_text(model.piece(i, special=True)) for i in range(model.n_vocab)])
    whole[list(model.ends)] = False
    with closing(LlamaGrammar(session, gbnf)) as theirs:
        for _ in range(n_steps):
            mine, wanted = ours.allowed(), theirs.allowed()
            differ = np.flatnonzero((mine != wanted) & whole)
            pieces = [model.piece(int(i), special=True) for i in differ[:5]]
            assert not len(differ), (gbnf, pieces)
            ends = list(model.ends)
            assert mine[ends].any() == wanted[ends].any()
            going_on = np.flatnonzero(mine & whole)
            if not len(going_on):
                break
            token = int(rng.choice(going_on))
            ours.accept(token)
            theirs.accept(token)


PUBLISHED = {  # llama.cpp's grammars/, and idioms of its README
    "list": r"root ::= item+" "\n" r'item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"',
    "arithmetic": r"""root  ::= (expr "=" term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= num | "(" expr ")"
num   ::= [0-9]+""",
    "json": r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}""",
    "words before an end": 'root ::= [a-z ]* "end" "."?',
    "right recursion": 'root ::= word " " root | word\nword ::= [a-z] word | [a-z]',
    "white space as it used to be": 'root ::= "a" ws "b"\nws ::= ([ \\t\\n] ws)?',
    "any character": 'root ::= . [^a-z]{2} . "x"',
    "unicode": 'root ::= [\\u3041-\\u3093ü\\U0001F600]+ "ß"',
    "nothing": 'root ::= "" | "a" ""',
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_grammar_allows_what_llama_cpp_allows(session: Session, name: str, seed: int) -> None:
    assert_same_masks(session, PUBLISHED[name], seed)


_LITERALS = st.text("abc ", min_size=1, max_size=3).map(lambda t: f'"{t}"')
_ATOMS = st.one_of(
    _LITERALS, st.sampled_from(["[a-c]", "[^a]", ".", "x", "y", "[ab] [bc]", '("a" | "b" "c")'])
)
_REPEATED = st.tuples(_ATOMS, st.sampled_from(["", "", "?", "*", "+", "{2}", "{1,3}", "{0,2}"]))
_SEQUENCES = st.lists(_REPEATED.map(lambda r: f"({r[0]}){r[1]}"), min_size=1, max_size=4)
_BODIES = st.lists(_SEQUENCES.map(" ".join), min_size=1, max_size=3).map(" | ".join)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(root=_BODIES, x=_BODIES, seed=st.integers(0, 1000))
def test_any_grammar_allows_what_llama_cpp_allows(
    session: Session, root: str, x: str, seed: int
) -> None:
    # llama.cpp ends the process at left recursion: y comes after a letter, and x refers to y only.
    x = re.sub(r"\bx\b", "y", x)
    gbnf = f'root ::= "a" ({root})\nx ::= "b" ({x})\ny ::= "c" ("a" y)? | "d"'
    assert_same_masks(session, gbnf, seed, n_steps=6)


@pytest.mark.parametrize("seed", range(3))
def test_an_ambiguous_grammar_ends_no_answer_that_was_begun(session: Session, seed: int) -> None:
    gbnf = 'root ::= "a" (([^a])* ([a-c])? ([^a])*)'
    assert_same_masks(session, gbnf, seed, n_steps=12)
    followed = GenerateOptions(n_predict=100, grammar=gbnf, temperature=2.0, seed=seed)
    pieces = list(session.generate("x", followed))
    text = "".join(piece.text for piece in pieces)
    assert text.startswith("a")
    assert text.count("a") <= 2


def test_limits_are_raised_for_a_begun_answer_only(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    gbnf = "root ::= ([^a])* ([a-c])? ([^a])*"
    low = [
        {**limits, "step_max_items": n}
        for limits, n in zip(_LIMITS, (2_000, 10**6, 10**6), strict=True)
    ]
    monkeypatch.setattr("offload.sampling.grammar._LIMITS", tuple(low))
    words = session.tokenize("def fibonacci", add_special=False, parse_special=False)
    followed = grammar(session, gbnf)
    followed.accept(words[0])
    raised = followed.allowed()
    monkeypatch.undo()
    usual = grammar(session, gbnf)
    usual.accept(words[0])
    assert (raised == usual.allowed()).all()
    low[0]["step_max_items"] = 10
    monkeypatch.setattr("offload.sampling.grammar._LIMITS", tuple(low))
    with pytest.raises(BadRequest, match="Too many items"):
        grammar(session, gbnf).allowed()


def test_left_recursion_which_llama_cpp_refuses_is_followed(session: Session) -> None:
    gbnf = 'root ::= root "+" n | n\nn ::= [0-9]'
    assert takes(session, "1+2+3", gbnf)
    assert not takes(session, "1+", gbnf)


def test_a_control_token_is_the_text_that_it_is_written_as(session: Session) -> None:
    (start,) = session.tokenize("<|im_start|>", add_special=False, parse_special=True)
    for gbnf in ('root ::= "<|im_start|>" "a"', 'root ::= [^b]* "b"'):
        followed = grammar(session, gbnf)
        assert followed.allows(start)
        followed.accept(start)
        assert not followed.allows(session.target.model.ends[0])
        assert_same_masks(session, gbnf, 1)


def test_a_grammar_may_name_tokens(session: Session) -> None:
    end = session.tokenize("<|im_start|>", add_special=False, parse_special=True)
    assert len(end) == 1
    for name in ("<|im_start|>", f"<[{end[0]}]>"):
        followed = grammar(session, f'root ::= "a" {name} "b"')
        followed.accept(session.tokenize("a", add_special=False, parse_special=False)[0])
        assert list(np.flatnonzero(followed.allowed())) == end
        followed.accept(end[0])
        assert not followed.allows(end[0])
    with pytest.raises(BadRequest, match="names '<no such thing>', which is"):
        grammar(session, "root ::= <no such thing>")


def test_a_grammar_may_hold_json_that_follows_a_schema(session: Session) -> None:
    gbnf = f'root ::= "call(" args ")"\nargs ::= %json {json.dumps(POINT)} | "nothing"'
    assert takes(session, 'call({"x": 1.5})', gbnf)
    assert takes(session, "call(nothing)", gbnf)
    assert not takes(session, 'call({"y": 1})', gbnf)
    assert not takes(session, 'call({ \n\n\n "x": 1})', gbnf)
    for bad, words in (
        ('root ::= %json {"a": }', "line 1, column 22: the schema is not JSON"),
        ("root ::= %json 5", "must be a JSON object"),
        ('root ::= %json {"type": "nonsense"}', "#/type: Invalid type: nonsense"),
        ("root ::= %lark {}", "only %json or %text may follow a %"),
    ):
        with pytest.raises(BadRequest, match=words):
            grammar(session, bad)


# -- schemas ---------------------------------------------------------------------------------------

NODE = {
    "$ref": "#/$defs/Node",  # as pydantic writes recursive models
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
        }
    },
}
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (NODE, '{"value": 1, "next": {"value": 2, "next": null}}', '{"value": 1}'),
        ({"definitions": {"I": {"type": "integer"}}, "$ref": "#/definitions/I"}, "12", '"a"'),
        ({"type": "string", "pattern": r"^\d{3}-\d+$"}, '"123-4"', '"12-4"'),
        ({"type": "string", "pattern": "b+"}, '"abbc"', '"ac"'),
        ({"type": "string", "pattern": r"^[\S]$"}, '"ü"', '"\ufeff"'),
        ({"type": "string", "pattern": r"^[^\S]$"}, '" "', '"a"'),
        ({"type": "string", "pattern": r"^[x\S ]$"}, '" "', '"\\t"'),
        ({"type": "string", "pattern": "^[[a]$"}, '"["', '"]"'),
        ({"type": "string", "pattern": "^[a&&b]$"}, '"&"', '"c"'),
        ({"type": "string", "pattern": "^[+--]$"}, '","', '"*"'),
        ({"type": "string", "pattern": "^[^]$"}, '"]"', '"ab"'),
        ({"type": "string", "pattern": "^(a|[])$"}, '"a"', '"]"'),
        ({"type": "string", "format": "date-time"}, '"2024-02-03T04:05:06Z"', '"yesterday"'),
        ({"type": "string", "format": "uuid"}, f'"{"1" * 8}-2222-4333-8444-{"5" * 12}"', '"1"'),
        ({"type": "string", "format": "a-format-of-ours"}, '"x"', "1"),
        ({"type": "integer", "minimum": 3, "maximum": 17}, "17", "18"),
        ({"type": "number", "exclusiveMinimum": 0}, "0.5", "0"),
        ({"type": "number", "minimum": 1.2345678901234567e-290}, "0.5", "0"),
        ({"minimum": 5, "exclusiveMinimum": 1e-290, "type": "number"}, "5", "4"),
        ({"type": "number", "exclusiveMinimum": -1e-290}, "0", "-1"),
        ({"type": "number", "maximum": -1e-290}, "-0.5", "0"),
        ({"type": "number", "exclusiveMaximum": 1e-290}, "-3", "0.5"),
        ({"type": "number", "maximum": 1.5e300}, "7", "null"),
        ({"type": "integer", "maximum": 2**70}, "7", "0.5"),
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, '"abc"', '"abcd"'),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
         "[1, 2]", "[1]"),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}],
          "items": False}, '[1, "a"]', '[1, "a", 2]'),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "null", "1"),
        ({"anyOf": [{"const": "a"}, {"enum": [4.0, True]}]}, "4", "5"),
        ({"const": 4.0}, "4", "4.5"),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"properties": {"b": {"type": "null"}}, "required": ["b"]}],
          "type": "object"}, '{"a": 1, "b": null}', '{"a": 1}'),
        (POINT, '{"x": 1.5}', '{"x": 1.5, "y": 2}'),  # llama.cpp's reading, too
        ({**POINT, "additionalProperties": {"type": "null"}}, '{"x": 1, "y": null}', '{"x": "a"}'),
        ({"type": ["integer", "null"]}, "null", '"a"'),
        ({"type": "object"}, '{"a": {"b": [1, "c"]}}', "[1]"),
        ({}, '[1, {"a": null}]', "nothing"),
        ({"const": {"properties": 1}}, '{"properties": 1}', "{}"),
    ],
)  # fmt: skip
def test_a_schema_is_followed(session: Session, schema: object, good: str, bad: str) -> None:
    assert takes(session, good, schema=schema)
    assert not takes(session, bad, schema=schema)


def test_white_space_is_bounded(session: Session) -> None:
    assert takes(session, '{\n  "x": 1\n}', schema=POINT)
    assert not takes(session, '{ \n\n\n "x": 1}', schema=POINT)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"a": ', "is not JSON: Expecting value: line 1 column 7"),
        ('{"minimum": ' + "9" * 5000 + "}", "or has too long a number"),
        ("[" * 100_000, "is nested too deeply"),
        ("[]", "must be a JSON object"),
        ({"type": "nonsense"}, "cannot be followed: #/type: Invalid type: nonsense"),
        ({"$ref": "#/$defs/none"}, "cannot be followed"),
        ({"$ref": "http://evil.example/x.json"}, "cannot be followed"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, r"minLength \(5\) is greater"),
        ({"enum": []}, "cannot be followed"),
        ({"type": "string", "pattern": "^(?=a)b$"}, "look-ahead"),
        ({"type": "string", "pattern": "(" * 3000}, "cannot be followed"),
        (" " * 300_000 + "{}", "has 300002 characters; at most 262144"),
    ],
)
def test_a_bad_schema_is_one_sentence(session: Session, schema: object, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        grammar(session, schema=schema).allowed()
    assert len(str(caught.value)) < 500
    assert "Error(" not in str(caught.value)
    assert "\n" not in str(caught.value)


# -- what is no value, and what takes too long -----------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"maxLength": 2**64},
        {"const": 10**400},
        {"minimum": 10**400},
        {"enum": ["\ud800"]},
        2**64,
        "\ud800",
    ],
)
def test_a_schema_with_what_is_no_value_is_refused(session: Session, part: object) -> None:
    with pytest.raises(BadRequest, match="JSON schema"):
        grammar(session, schema={"type": "object", "properties": {"a": part}})


def test_a_grammar_that_is_slow_at_every_token_is_stopped(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.ggml.sampler._GRAMMAR_S", -1.0)
    with pytest.raises(BadRequest, match="takes too long to follow"):
        list(session.generate("a", GenerateOptions(n_predict=4, grammar='root ::= "a"+')))


# -- preparing the vocabulary ----------------------------------------------------------------------


def test_the_vocabulary_is_prepared_before_the_first_grammar(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Counted(GrammarTokens):
        def __init__(self, vocabulary: GrammarVocabulary) -> None:
            super().__init__(vocabulary)
            made.append(self)

    monkeypatch.setattr(sampler, "_grammar_tokens", WeakKeyDictionary())
    monkeypatch.setattr(sampler, "GrammarTokens", Counted)
    session.prepare()
    assert len(made) == 1
    followed = GenerateOptions(n_predict=8, grammar='root ::= "abc"')
    assert "".join(piece.text for piece in session.generate("def", followed)) == "abc"
    assert len(made) == 1
