"""The GBNF parser: positions of errors, limits, and one pass over the text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload.errors import BadRequest
from offload.sampling.gbnf import lark_of_gbnf


def lark(text: str) -> str:
    return lark_of_gbnf(text, lambda _: 7)


def test_each_part_of_the_notation_has_its_lark() -> None:
    found = lark(
        'root ::= "ab"? [^a-c\\n-]{2,} | # why\n  other (\n "x" | ) <[12]> !<x>\nother ::= .'
    )
    assert found.splitlines()[2:] == [
        r"start: (((/[\x{61}-\x{61}]/ /[\x{62}-\x{62}]/))? "
        r"(/[^\x{61}-\x{63}\x{a}-\x{a}\x{2d}-\x{2d}]/){2,} | "
        r"""r1 ((/[\x{78}-\x{78}]/) | "") <[12]> <[^7]>)""",
        "r1: (/(?s:.)/)",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rule named root"),
        ("root", "line 1, column 5: ::= is missing"),
        ("root ::= x", "line 1, column 10: there is no rule x"),
        (
            'root ::= "a"\nx ::= "',
            "line 2, column 7: the text that begins here has no closing quote",
        ),
        ("root ::= [a", r"line 1, column 10: this \[ has no \]"),
        ("root ::= (", r"line 1, column 10: this \( has no \)"),
        ("root ::= )", r"line 1, column 10: '\)' is not expected here"),
        ('root ::= "\\q"', r"line 1, column 11: \\q is not an escape"),
        ('root ::= "\\x4"', r"line 1, column 11: \\x needs 2 hexadecimal digits"),
        ('root ::= "\\uD800"', r"line 1, column 11: U\+D800 is not a valid character"),
        ("root ::= [z-a]", "column 10: a range of characters ends before it begins"),
        ('root ::= "a"{2,1}', r"column 13: \{2,1\} asks for at least 2 and at most 1"),
        ('root ::= "a"{2001}', "column 14: 2001 repetitions: at most 2000"),
        ('root ::= "a"{' + "9" * 100_000, "column 14: 999999999999 repetitions"),
        ('root ::= "a"{1', r"column 13: this \{ has no \}"),
        ("root ::= *", r"there is nothing before '\*' to repeat"),
        ("root ::= <nothing", r"a token is written <\[ID\]> or <TEXT>"),
        ("root ::= " + "(" * 65, "column 74: over 64 brackets are nested"),
        ('root ::= "' + "a" * 60_001 + '" "b"', "the grammar has over 60000 symbols"),
        ('root ::= "' + "a" * 4_200_000, "has 4200010 bytes; at most 4194304"),
        ('root ::= "\udc80"', "is not valid Unicode"),
    ],
)
def test_a_mistake_has_its_place(text: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        lark(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "hostile", ["[", "(", '"', "a", "|", "{", "\\", "#", "<", "!", "::=", "\n"]
)
def test_a_long_text_is_read_once(hostile: str) -> None:
    """A parser that reads the text again from each character would take minutes."""
    for before in ("", "root ::= ", 'root ::= "a" '):
        with pytest.raises(BadRequest):
            lark(before + hostile * (200_000 // len(hostile)) + "\n~")


def test_recursion_at_the_right_end_becomes_a_loop() -> None:
    for text in ('root ::= [a-z] root | "x"', "root ::= ([a-z] root)?"):
        found = lark(text)
        assert found.count("start") == 1
        assert "*" in found


def test_other_recursion_stays() -> None:
    for text in ('root "x" | "y"', '"(" root ")"', '"a" root', '("a" root)*?'):
        assert lark("root ::= " + text).count("start") == 2


@settings(max_examples=300, deadline=None)
@given(st.text('root::=abc "[]()|*+?{},0123\\x^-.<>!\n#', max_size=60))
@example("[\\\n")
def test_any_text_is_a_grammar_or_one_sentence(text: str) -> None:
    said, found = "", ""
    try:
        found = lark("root ::= " + text)
    except BadRequest as e:
        said = str(e)
    assert ("start: " in found) != bool(said)
    assert "\n" not in said
