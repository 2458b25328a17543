"""Milliseconds of a mask over a whole vocabulary, by llguidance and by libllama's own grammars.

The GGUF may hold a vocabulary alone, as those in llama.cpp's models/ do.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from time import perf_counter

import llama_cpp
import numpy as np
from llama_cpp.llama_grammar import json_schema_to_gbnf

from offload.sampling.grammar import Grammar, GrammarTokens, grammar_of

TOKEN = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
}
JSON_GBNF = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}"""
TEXT = '{"name": "Anna Maria Müller", "age": 42, "tags": ["red", "blue"]}'


class Vocabulary:
    """A GGUF's, through llama_cpp alone."""

    def __init__(self, path: Path) -> None:
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise SystemExit(f"{path}: cannot be read")
        self.vocab = llama_cpp.llama_model_get_vocab(model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        is_end = llama_cpp.llama_vocab_is_eog
        self.ends = [i for i in range(self.n_vocab) if is_end(self.vocab, i)]

    def piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(1024)
        n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, 1024, 0, special)
        return buffer.raw[: max(n, 0)]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raw = text.encode()
        out = (ctypes.c_int32 * (len(raw) + 8))()
        n = llama_cpp.llama_tokenize(
            self.vocab, raw, len(raw), out, len(out), add_special, parse_special
        )
        return list(out[:n])


def times_ms(mask: Callable[[], object], accept: Callable[[int], object], ids: list[int]) -> str:
    """The mean and the longest of the masks along a text."""
    took = []
    for token in ids:
        began = perf_counter()
        mask()
        took.append(1e3 * (perf_counter() - began))
        accept(token)
    return f"{fmean(took):8.3f} {max(took):8.3f}"


def of_llguidance(grammar: Grammar, ids: list[int]) -> str:
    return times_ms(grammar.allowed, grammar.accept, ids)


def of_libllama(vocabulary: Vocabulary, gbnf: str, ids: list[int]) -> str:
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary.vocab, gbnf.encode(), b"root")
    n = vocabulary.n_vocab
    row = np.zeros(n, TOKEN)
    data = ctypes.cast(row.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))

    def mask() -> None:
        row["id"], row["logit"] = np.arange(n), 1.0
        array = llama_cpp.llama_token_data_array(data, n, -1, False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))

    return times_ms(mask, lambda token: llama_cpp.llama_sampler_accept(sampler, token), ids)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("scripts/grammar-cost VOCABULARY.gguf")
    vocabulary = Vocabulary(Path(sys.argv[1]))
    ids = vocabulary.tokenize(TEXT, add_special=False, parse_special=False)
    began = perf_counter()
    tokens = GrammarTokens(vocabulary)
    print(f"{vocabulary.n_vocab} tokens, prepared in {perf_counter() - began:.2f} s")
    schema = json.dumps(SCHEMA)
    for name, gbnf, json_schema, theirs in (
        ("schema", None, schema, json_schema_to_gbnf(schema)),
        ("json.gbnf", JSON_GBNF, None, JSON_GBNF),
    ):
        grammar = grammar_of(lambda: tokens, gbnf, json_schema)
        assert grammar is not None
        print(f"{name:10} llguidance mean, longest ms {of_llguidance(grammar, ids)}")
        print(f"{name:10} libllama   mean, longest ms {of_libllama(vocabulary, theirs, ids)}")


if __name__ == "__main__":
    main()
