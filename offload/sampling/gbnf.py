"""Translates GBNF, llama.cpp's grammar notation, to Lark for `llguidance`. Pure, in linear time.

Notation: grammars/README.md of llama.cpp. In addition, `%json {...}` is JSON that follows a schema,
and `%text {...}` is text without quotes up to a marker, as `text_symbol` writes it.
Lark as llguidance reads it: https://github.com/guidance-ai/llguidance. A lexer that takes the
longest match would change the language of a grammar such as `[a-z]* "end"`. Each character is
therefore its own lexeme, and the parser alone decides, as in llama.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from offload.errors import BadRequest
from offload.sampling.json_schema import read_schema
from offload.sampling.schema_text import Rule, lark_of_text

MOST_GRAMMAR_BYTES = 4 * 1024 * 1024  # time and symbols limit a grammar before its size does
DEEPEST_GRAMMAR = 64  # most nested brackets
MOST_REPEATED = 2000  # most repetitions of a symbol, as in llama.cpp
MOST_SYMBOLS = 60_000  # characters, classes and references of all rules; llguidance has 16 bits

_NAME = re.compile(r"[A-Za-z0-9-]+")
_NUMBER = re.compile(r"[0-9]+")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_SURROGATES = range(0xD800, 0xE000)
_LAST_CHARACTER = 0x10FFFF


_EMPTY = '""'
_ANY = "/(?s:.)/"
_SIGNS: dict[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}
# If only one text can follow, allow all tokens that spell it, not only the tokeniser's choice.
_HEAD = '%llguidance {"no_forcing": true}'


class Symbol(NamedTuple):
    """A part of a rule as Lark text, with its alternatives if it is a group."""

    text: str
    alternatives: Alternatives = ()  # alternatives of a group
    is_optional: bool = False


Alternatives = tuple[tuple[Symbol, ...], ...]


def text_symbol(rule: Rule | None, end: str, marker: str, without: Sequence[str] = ()) -> str:
    """Return the symbol for text by a rule up to `end`. No `marker` may be in it.

    It matches none of the regular expressions `without`.
    """
    asked = {"rule": rule, "end": end, "marker": marker, "without": without}
    return f"%text {json.dumps(asked)}"


def lark_of_gbnf(text: str, token_of: Callable[[str], int], root: str = "root") -> str:
    """Return a Lark grammar of the same language, in which the rule `root` is named `start`.

    `token_of` returns the id of a token that the grammar names as `<text>`, and raises BadRequest
    if the text is not one token. Raises BadRequest with line and column.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise BadRequest(f"the grammar is not valid Unicode: {e.reason}") from e
    if size > MOST_GRAMMAR_BYTES:
        raise BadRequest(f"the grammar has {size} bytes; at most {MOST_GRAMMAR_BYTES} are read")
    return _GbnfReader(text, token_of, root).read()


class _GbnfReader:
    """Reads GBNF from left to right, each character once."""

    def __init__(self, text: str, token_of: Callable[[str], int], root: str) -> None:
        self._text, self._token_of, self._root = text, token_of, root
        self._at = 0
        self._n_symbols = 0
        self._depth = 0
        self._named_at: dict[str, int] = {}  # position of the first reference to each rule
        self._rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}  # names by definition
        self._names = {root: "start"}  # rule names in Lark by name in GBNF

    def read(self) -> str:
        self._skip(newlines=True)
        while self._at < len(self._text):
            self._rule()
            self._skip(newlines=True)
        if self._root not in self._rules:
            raise BadRequest(f"the grammar does not parse: it has no rule named {self._root}")
        for name, at in self._named_at.items():
            if name not in self._rules:
                self._fail(f"there is no rule {name[:60]}", at)
        lines = [f"{self._lark_name(name)}: {rule}" for name, rule in self._rules.items()]
        lines += [f"{name}: {definition}" for definition, name in self._terminals.items()]
        return "\n".join([_HEAD, "", *lines, ""])

    def _lark_name(self, name: str) -> str:
        return self._names.setdefault(name, f"r{len(self._names)}")

    # -- rules -----------------------------------------------------------------------------------

    def _rule(self) -> None:
        name = self._match(_NAME, "a rule's name")
        self._skip(newlines=False)
        if self._text[self._at : self._at + 3] != "::=":
            self._fail("::= is missing")
        self._at += 3
        self._skip(newlines=True)
        alternatives = self._alternatives(nested=False)
        self._rules[name] = _looped(self._lark_name(name), alternatives)
        if self._at < len(self._text) and self._peek() not in "\r\n":
            self._fail(f"{self._peek()!r} is not expected here")

    def _alternatives(self, *, nested: bool) -> Alternatives:
        alternatives = [self._sequence(nested=nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip(newlines=True)
            alternatives.append(self._sequence(nested=nested))
        return tuple(alternatives)

    def _sequence(self, *, nested: bool) -> tuple[Symbol, ...]:
        symbols: list[Symbol] = []
        while (symbol := self._symbol(nested=nested)) is not None:
            self._skip(newlines=nested)
            while (times := self._times(nested=nested)) is not None:
                symbol = _repeated(symbol, *times)
            symbols.append(symbol)
        return tuple(symbols)

    def _symbol(self, *, nested: bool) -> Symbol | None:
        """Read the next symbol; returns None at the end of a sequence."""
        self._n_symbols += 1
        if self._n_symbols > MOST_SYMBOLS:
            self._fail(f"the grammar has over {MOST_SYMBOLS} symbols")
        match self._peek():
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return Symbol(_ANY)
            case "(":
                return self._group()
            case "<" | "!":
                return self._token()
            case "%":
                return self._text_until() if self._word() == "%text" else self._json()
            case "*" | "+" | "?" | "{":
                self._fail(f"there is nothing before {self._peek()!r} to repeat")
        name = _NAME.match(self._text, self._at)
        if name is None:
            return None
        self._named_at.setdefault(name[0], self._at)
        self._at = name.end()
        return Symbol(self._lark_name(name[0]))

    def _group(self) -> Symbol:
        opened = self._at
        self._depth += 1
        if self._depth > DEEPEST_GRAMMAR:
            self._fail(f"over {DEEPEST_GRAMMAR} brackets are nested")
        self._at += 1
        self._skip(newlines=True)
        inside = self._alternatives(nested=True)
        if self._peek() != ")":
            if not self._peek():
                self._fail("this ( has no )", opened)
            self._fail(f"{self._peek()!r} is not expected here")
        self._at += 1
        self._depth -= 1
        return Symbol(_text(inside), inside)

    def _times(self, *, nested: bool) -> tuple[int, int | None] | None:
        """Read a repetition; returns (least, most), or None if there is none."""
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        sign = self._peek()
        if sign in simple:
            self._at += 1
            self._skip(newlines=nested)
            return simple[sign]
        if sign != "{":
            return None
        at = self._at
        self._at += 1
        self._skip(newlines=nested)
        least = most = self._number()
        self._skip(newlines=nested)
        if self._peek() == ",":
            self._at += 1
            self._skip(newlines=nested)
            most = self._number() if self._peek().isdecimal() else -1
            self._skip(newlines=nested)
        if self._peek() != "}":
            self._fail("this { has no }", at)
        self._at += 1
        self._skip(newlines=nested)
        if 0 <= most < least:
            self._fail(f"{{{least},{most}}} asks for at least {least} and at most {most}", at)
        return least, None if most < 0 else most

    def _number(self) -> int:
        at = self._at
        digits = self._match(_NUMBER, "a number of repetitions")
        if len(digits) > 6 or int(digits) > MOST_REPEATED:
            self._fail(f"{digits[:12]} repetitions: at most {MOST_REPEATED} are allowed", at)
        return int(digits)

    # -- characters ------------------------------------------------------------------------------

    def _literal(self) -> Symbol:
        opened = self._at
        self._at += 1
        symbols = []
        while self._peek() != '"':
            if not self._peek():
                self._fail("the text that begins here has no closing quote", opened)
            code = self._character()
            symbols.append(_one_of([(code, code)]))
        self._at += 1
        self._n_symbols += len(symbols)
        return Symbol(f"({' '.join(symbols) or _EMPTY})")

    def _class(self) -> Symbol:
        opened = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            if not self._peek():
                self._fail("this [ has no ]", opened)
            first = last = self._character()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._character()
            if last < first:
                self._fail("a range of characters ends before it begins", opened)
            ranges.append((first, last))
        self._at += 1
        if not ranges:
            return Symbol(_EMPTY)  # an empty class, negated or not, matches "" as in llama.cpp
        return Symbol(_one_of(ranges, negated))

    def _character(self) -> int:
        at, character = self._at, self._peek()
        if not character:
            self._fail("the grammar ends inside a text")
        self._at += 1
        if character != "\\":
            return self._checked(ord(character), at)
        kind = self._peek()
        self._at += 1
        if kind in _HEX:
            digits = self._text[self._at : self._at + _HEX[kind]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
                self._fail(f"\\{kind} needs {_HEX[kind]} hexadecimal digits", at)
            self._at += len(digits)
            return self._checked(int(digits, 16), at)
        if kind not in _ESCAPED:
            shown = kind if kind.isprintable() else repr(kind)[1:-1]
            self._fail(f"\\{shown} is not an escape", at)
        return ord(_ESCAPED[kind])

    def _checked(self, code: int, at: int) -> int:
        if code in _SURROGATES or code > _LAST_CHARACTER:
            self._fail(f"U+{code:04X} is not a valid character", at)
        return code

    def _token(self) -> Symbol:
        negated = self._peek() == "!"
        self._at += negated
        at = self._at
        end = self._text.find(">", at)
        if self._peek() != "<" or end < 0 or end - at > 256:
            self._fail("a token is written <[ID]> or <TEXT>", at)
        words = self._text[at : end + 1]
        by_number = re.fullmatch(r"<\[([0-9]{1,9})\]>", words)
        token = int(by_number[1]) if by_number else self._token_of(words)
        self._at = end + 1
        return Symbol(f"<[{'^' if negated else ''}{token}]>")

    def _json(self) -> Symbol:
        if self._word() != "%json":
            self._fail("only %json or %text may follow a %")
        schema = self._object("schema")
        return Symbol(f"%json {json.dumps(read_schema(json.dumps(schema)))}")

    def _text_until(self) -> Symbol:
        at = self._at
        asked = self._object("rule of a text")
        try:
            lark = lark_of_text(asked["rule"], asked["end"], asked["marker"], asked["without"])
        except (KeyError, TypeError, ValueError, RecursionError):
            self._fail("%text needs a rule, an end, a marker and a list of what is excluded", at)
        name = self._terminals.setdefault(lark, f"T{len(self._terminals)}")
        return Symbol(name)

    def _word(self) -> str:
        return self._text[self._at : self._at + 5]

    def _object(self, what: str) -> dict[str, Any]:
        """Read a word and the JSON object behind it."""
        at = self._at
        self._at += 5
        self._skip(newlines=False)
        try:
            schema, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
        except json.JSONDecodeError as e:
            self._fail(f"the {what} is not JSON: {e.msg}", e.pos)
        except (ValueError, RecursionError):
            self._fail(f"the {what} is nested too deeply or has too long a number", at)
        if not isinstance(schema, dict):
            self._fail(f"the {what} must be a JSON object", at)
        return schema

    # -- reading ---------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            self._fail(f"{what} is missing")
        self._at = match.end()
        return match[0]

    def _skip(self, *, newlines: bool) -> None:
        text, at = self._text, self._at
        blank = " \t\r\n" if newlines else " \t"
        while at < len(text):
            if text[at] == "#":
                while at < len(text) and text[at] not in "\r\n":
                    at += 1
            elif text[at] in blank:
                at += 1
            else:
                break
        self._at = at

    def _fail(self, what: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        raise BadRequest(f"the grammar does not parse: line {line}, column {column}: {what}")


# -- Lark ------------------------------------------------------------------------------------------


def _text(alternatives: Alternatives) -> str:
    return f"({' | '.join(' '.join(s.text for s in a) or _EMPTY for a in alternatives)})"


def _one_of(ranges: Sequence[tuple[int, int]], negated: bool = False) -> str:
    """Return Lark for a character in these closed ranges, or if `negated` for any other."""
    inside = "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in ranges)
    return f"/[{'^' if negated else ''}{inside}]/"


def _repeated(symbol: Symbol, least: int, most: int | None) -> Symbol:
    if most == 0:
        return Symbol(_EMPTY)
    sign = _SIGNS.get((least, most), f"{{{least},{'' if most is None else most}}}")
    text = f"({symbol.text}){sign}"
    return Symbol(text, symbol.alternatives, True) if sign == "?" else Symbol(text)


def _looped(name: str, alternatives: Alternatives) -> str:
    """Return a rule's alternatives; `r ::= a r | b` and `r ::= (a r)?` are written as loops.

    In an Earley parser each turn of a recursion at the right end costs more than the turn before.
    """
    if len(alternatives) == len(alternatives[0]) == 1:
        only = alternatives[0][0]
        if only.is_optional and any(a and a[-1].text == name for a in only.alternatives):
            alternatives = (*only.alternatives, ())
    turns = tuple(a[:-1] for a in alternatives if a and a[-1].text == name)
    ends = tuple(a for a in alternatives if not a or a[-1].text != name)
    if not turns or not ends:
        return _text(alternatives)
    return f"({_text(turns)})* {_text(ends)}"
