"""Grammars and JSON schemas that try to stall a server. Each must soon get an answer, or an error
of one clear sentence."""

from __future__ import annotations

import json

_DOUBLING = "\n".join(f"x{i} ::= x{i + 1} x{i + 1}" for i in range(14))
HOSTILE_GRAMMARS = {
    "maximum below minimum": 'root ::= "a"{2,1}',
    "400 optional letters": "root ::= " + '"a"? ' * 400,
    "800 optional letters": "root ::= " + '"a"? ' * 800,
    "5000 optional letters": "root ::= " + '"a"? ' * 5000,
    "100,000 optional letters": "root ::= " + '"a"?' * 65_000,
    "14 doubling rules": f'root ::= x0\n{_DOUBLING}\nx14 ::= "a"?',
    "14 doubling rules of a letter": f'root ::= x0\n{_DOUBLING}\nx14 ::= "a"',
    "20 long classes": "root ::= " + "[a-z]{0,2000} " * 20,
    "nested repetitions": "root ::= " + "(" * 12 + "[a-z]{0,2000}" + "){0,2000}" * 12,
    "stars of nothing": 'root ::= ((("a"?)*)*)*',
    "40,000 open brackets": "root ::= " + "[" * 40_000,
    "40,000 groups": "root ::= " + "(" * 40_000,
    "40,000 quotes": "root ::= " + '"' * 40_001,
    "recursion both ways": 'root ::= root root root | "a" | ""',
    "rules of each other": "root ::= x\nx ::= y\ny ::= x",
    "2000 stars": "root ::= " + "[a-z]* " * 2000,
    "a number of 100,000 digits": 'root ::= "a"{' + "9" * 100_000 + "}",
    "50,000 rules": "\n".join(f"r{i} ::= r{i + 1}" for i in range(15_000)),
}
HOSTILE_SCHEMAS: dict[str, object] = {
    "optional letters, repeated": {"type": "string", "pattern": "^(a?)*" + "(a?)*" * 50 + "$"},
    "half a billion letters": {"type": "string", "pattern": "^a{500000000}$"},
    "nested repetitions": {"type": "string", "pattern": "(" * 20 + "a?" + "){100}" * 20},
    "20 long classes": {"type": "string", "pattern": "^" + "[a-z]{0,2000}" * 20 + "$"},
    "look for a distant letter": {"type": "string", "pattern": "(.*a){30}.*b.{30}"},
    "half a billion characters": {"type": "string", "minLength": 500_000_000},
    "half a billion items": {"type": "array", "items": {}, "minItems": 500_000_000},
    "a reference to itself": {"$ref": "#"},
    "references in a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "doubling choices": {
        "$defs": {
            **{f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 2} for i in range(40)},
            "x40": {"type": "integer"},
        },
        "$ref": "#/$defs/x0",
    },
    "a product of choices": {
        "allOf": [
            {"anyOf": [{"properties": {f"a{j}_{i}": {}}} for i in range(8)]} for j in range(8)
        ]
    },
    "2000 properties": {
        "type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)},
    },
    "20,000 choices": {"enum": [f"value {i}" for i in range(10_000)]},
    "a number that llguidance cannot write": {"const": 1 - 2**63},  # it ends the process
    "doubling parts of an object": {
        "$defs": {
            **{
                f"x{i}": {
                    "allOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 2,
                    "properties": {f"p{i}": {}},
                }
                for i in range(40)
            },
            "x40": {"type": "object"},
        },
        "$ref": "#/$defs/x0",
    },
    "nested too deep": json.loads('{"items":' * 60 + "{}" + "}" * 60),
}  # fmt: skip
