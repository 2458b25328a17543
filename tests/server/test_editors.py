"""Requests to /infill as llama.vim and llama.vscode send them, to a real server.

The fields are those of `llama#fim` and `s:ring_update` in llama.vim's autoload/llama.vim, and of
`createRequestPayload` in llama.vscode's src/llama-server.ts. The embedded model has no tokens for
filling in, so three others stand for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from program import Program, serving
from running import http

MARKERS = [
    f"--override-kv=tokenizer.ggml.fim_{name}_token_id=int:{token}"
    for name, token in (("pre", 21), ("suf", 22), ("mid", 23))
]
FILES = [
    {
        "text": "def add(left, right):\n    return left + right\n",
        "time": [0, 1],
        "filename": "a.py",
    },
    {
        "text": "def sub(left, right):\n    return left - right\n",
        "time": [0, 2],
        "filename": "b.py",
    },
]
PREFIX = "".join(
    f"def method_{n}(self, value):\n    return self.items[{n}].method(value)\n\n\n"
    for n in range(6)
)
SUFFIX = "\n\nprint(method_6(1))\n"
FIELDS = [
    "content",
    *(f"timings/prompt_{name}" for name in ("n", "ms", "per_token_ms", "per_second")),
    *(f"timings/predicted_{name}" for name in ("n", "ms", "per_token_ms", "per_second")),
    "truncated",
    "tokens_cached",
]
SAMPLERS = ["top_k", "top_p", "infill"]


def vim(typed: str) -> dict[str, Any]:
    return {
        "input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": FILES, "prompt": typed,
        "n_predict": 24, "n_indent": len(typed) - len(typed.lstrip()), "top_k": 40, "top_p": 0.99,
        "stream": False, "samplers": SAMPLERS, "cache_prompt": True, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000, "response_fields": FIELDS,
    }  # fmt: skip


def vscode(typed: str) -> dict[str, Any]:
    return {
        "input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": FILES, "prompt": typed,
        "n_predict": 24, "top_k": 40, "top_p": 0.99, "stream": False, "samplers": SAMPLERS,
        "cache_prompt": True, "t_max_prompt_ms": 2500, "t_max_predict_ms": 2500,
    }  # fmt: skip


# Sent when the editor has read another part of a file, so that its tokens are cached.
AHEAD: dict[str, Any] = {
    "input_prefix": "", "input_suffix": "", "input_extra": FILES, "prompt": "", "n_predict": 0,
    "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1,
}  # fmt: skip
AHEAD_VIM = {**AHEAD, "temperature": 0.0, "stream": False, "response_fields": [""]}


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    # The default policy drafts only what saves time on this machine.
    n_grams = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4")
    drafts = (*n_grams, "--spec-policy", "fixed")
    flags = ("--device", "cpu", "-np", "1", "--ctx-size", "1024", *drafts)
    with serving(*flags, *MARKERS) as program:
        yield program


def filled(server: Program, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(server.url + "/infill", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def n_tokens(server: Program, text: str) -> int:
    return len(http.post(server.url + "/tokenize", json={"content": text}).json()["tokens"])


def test_llama_vim_gets_the_fields_that_it_shows(server: Program) -> None:
    assert sorted(filled(server, vim("def met"))) == sorted(FIELDS)
    assert filled(server, AHEAD_VIM) == {}


def test_llama_vscode_gets_the_fields_that_it_shows(server: Program) -> None:
    found = filled(server, vscode("def met"))
    assert found["content"]
    assert {"prompt_n", "prompt_ms", "predicted_n", "predicted_per_second"} <= found[
        "timings"
    ].keys()
    assert found["truncated"] is False
    assert {"generation_settings", "tokens_cached"} <= found.keys()
    assert filled(server, AHEAD)["content"] == ""


def test_files_that_an_editor_sends_ahead_are_cached(server: Program) -> None:
    texts = [f"class Part{n}:\n    size = {n}{n}\n    def half(self): ...\n" for n in (7, 8)]
    files = [{"text": text, "filename": "parts.py"} for text in texts]
    filled(server, {**AHEAD, "input_extra": files[:1]})
    n_ahead = filled(server, {**AHEAD, "input_extra": files})["timings"]["cache_n"]
    assert n_ahead >= n_tokens(server, texts[0])
    found = filled(server, {**vscode(""), "input_extra": files})["timings"]
    assert found["cache_n"] >= n_ahead + n_tokens(server, texts[1]) - 1


@pytest.mark.parametrize("request_of", [vim, vscode])
def test_a_key_costs_no_tokens_before_the_cursor(server: Program, request_of: Any) -> None:
    """Another key may change the tokens of the typed text. The text after the cursor comes last."""
    n_after = n_tokens(server, SUFFIX) + 2
    filled(server, request_of("d"))
    typed = "def method_6(self, value):"
    for n in range(2, len(typed) + 1):
        body = {**request_of(typed[:n]), "n_predict": 1, "response_fields": None}
        found = filled(server, body)["timings"]
        assert found["prompt_n"] <= n_after + 4
        assert found["cache_n"] > n_tokens(server, PREFIX)


def test_drafts_come_from_the_file(server: Program) -> None:
    body = {
        **vscode("def method_6(self, value):\n    return"),
        "t_max_predict_ms": 60_000,
        "top_k": 1,
    }
    assert filled(server, body)["timings"]["draft_n_accepted"] > 0
