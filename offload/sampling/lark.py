"""Rules of GBNF as a Lark grammar that `llguidance` follows. Pure.

A lexer that takes the longest match would change the language of a grammar such as
`[a-z]* "end"`. So each character is a lexeme of its own, and the parser alone decides, as in
llama.cpp. What Lark is to llguidance: https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from offload.sampling.gbnf import Characters, Group, Json, Reference, Repeated, Symbol, Token
from offload.sampling.json_schema import read_schema

_EMPTY = '""'
# Where only one text can follow, any tokens that spell it may, not only the tokeniser's own.
_OPTIONS = '%llguidance {"no_forcing": true}'


def lark_of_rules(rules: Mapping[str, Group]) -> str:
    """The grammar of the same language; its rule start is `root`."""
    names = {"root": "start"} | {n: f"r{i}" for i, n in enumerate(rules) if n != "root"}
    lines = [f"{names[n]}: {_text(_looped(n, rule), names)}" for n, rule in rules.items()]
    return "\n".join([_OPTIONS, "", *lines, ""])


def _looped(name: str, rule: Group) -> Group:
    """`r ::= a r | b`, and so `r ::= (a r)?`, as `a* b`: an Earley parser follows a recursion at
    the right end at a cost that grows with each turn."""
    alternatives = rule.alternatives
    if len(alternatives) == 1 and len(alternatives[0]) == 1:
        only = alternatives[0][0]
        if isinstance(only, Repeated) and (only.least, only.most) == (0, 1):
            inside = only.symbol.alternatives if isinstance(only.symbol, Group) else ()
            if any(a and a[-1] == Reference(name) for a in inside):
                alternatives = (*inside, ())
    turns = tuple(a[:-1] for a in alternatives if a and a[-1] == Reference(name))
    ends = tuple(a for a in alternatives if not a or a[-1] != Reference(name))
    if not turns or not ends:
        return rule
    return Group(((Repeated(Group(turns), 0, None), Group(ends)),))


def _text(symbol: Symbol, names: Mapping[str, str]) -> str:
    match symbol:
        case Characters(ranges, negated):
            return _class(ranges, negated)
        case Token(token, negated):
            return f"<[{'^' if negated else ''}{token}]>"
        case Reference(name):
            return names[name]
        case Json(schema):
            return f"%json {json.dumps(read_schema(schema))}"
        case Repeated(inside, least, most):
            return _repeated(_text(inside, names), least, most)
        case Group(alternatives):
            found = (" ".join(_text(s, names) for s in a) or _EMPTY for a in alternatives)
            return f"({' | '.join(found)})"


def _class(ranges: tuple[tuple[int, int], ...], negated: bool) -> str:
    if not ranges:
        return "/(?s:.)/"
    inside = "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in ranges)
    return f"/[{'^' if negated else ''}{inside}]/"


def _repeated(text: str, least: int, most: int | None) -> str:
    if most == 0:
        return _EMPTY
    signs: dict[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    sign = signs.get((least, most), f"{{{least},{'' if most is None else most}}}")
    return f"({text}){sign}"
