"""Words of the page, which node renders without a browser: the welcome, and the tab "Why"."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specoffload.server.page
from specoffload.generation.statistics import GenerationStats
from specoffload.server.api.answers import timings_of

NODE = shutil.which("node")
STATIC = Path(specoffload.server.page.__file__).parent / "static"

# Stands in for the document: elements keep their title, their children and their text.
DOCUMENT = """
class Node {
  constructor() { this.children = []; this.style = {}; this.dataset = {}; this.title = ""; }
  setAttribute(name, value) { if (name === "title") this.title = value; }
  addEventListener() {}
  append(...added) { this.children.push(...added); }
  replaceChildren(...added) { this.children = added; }
  get lines() {
    const found = this.children.flatMap((c) => (c instanceof Node ? c.lines : [String(c)]));
    return this.title ? [this.title, ...found] : found;
  }
}
globalThis.document = { createElement: () => new Node(), createElementNS: () => new Node() };
const parts = await import(process.argv[1]);
const asked = JSON.parse(process.argv[2]);
const root = new Node();
"""
SAY = "console.log(JSON.stringify(root.lines));"
SHOW_WHY = "parts.showWhy(root, {}, {}, { timings: asked });"
SHOW_WELCOME = "root.append(...parts.welcomeParts(asked.is_demo, asked.name, () => {}));"

ONE = GenerationStats(
    n_tokens=1,
    n_rounds=1,
    n_drafted=1,
    n_accepted=1,
    acceptance_per_position=(1.0,),
    draft_lengths=((1, 1),),
    decisions=(("fixed length of #", 1),),
    last_reasons=("fixed length of 1",),
)


def _rendered(module: str, show: str, asked: dict[str, Any]) -> list[str]:
    """The texts and titles of what `show` puts into the page."""
    if NODE is None:
        pytest.skip("no node is installed")
    program = f"{DOCUMENT}{show}\n{SAY}"
    command = [NODE, "--no-warnings", "--experimental-default-type=module", "-e", program]
    done = subprocess.run(
        [*command, (STATIC / module).as_uri(), json.dumps(asked)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines: list[str] = json.loads(done.stdout)
    return lines


def _shown(stats: GenerationStats) -> list[str]:
    """The texts and titles that the tab has for an answer with these statistics."""
    return _rendered("why.js", SHOW_WHY, timings_of(stats))


def test_the_welcome_says_what_the_demo_pair_is_and_what_fetches_another_model() -> None:
    demo = _rendered("welcome.js", SHOW_WELCOME, {"is_demo": True, "name": "demo-pair"})
    assert demo[0] == "The demo pair"
    assert "".join(demo[1:4]) == (
        "A small model, trained on Python source, that comes with the program. It continues code "
        "and answers no questions. specoffload serve -hf USER/REPO fetches a model to talk to."
    )
    stream = "class StreamWriter(Codec,codecs.StreamWriter):"
    assert demo[4:] == [stream, "def __init__(self, name):", "def test_read(self):"]
    other = _rendered("welcome.js", SHOW_WELCOME, {"is_demo": False, "name": "Qwen3"})
    assert other[:2] == [
        "What would you like to know?",
        "Qwen3 is ready. What you write goes only to this server.",
    ]
    assert not any("demo" in line or "def " in line for line in other)


def test_counts_of_one_are_singular() -> None:
    lines = _shown(ONE)
    assert "1 token in 1 round, 1 token a round. 1 of 1 drafted token kept (100 %)." in lines
    assert "1 round drafted 1 token" in lines
    assert "fixed length of 1 (1 round; the numbers are the last round's)" in lines


def test_counts_of_several_are_plural_and_reasons_have_their_numbers() -> None:
    several = replace(
        ONE,
        n_tokens=5,
        n_rounds=4,
        n_drafted=6,
        draft_lengths=((0, 1), (2, 3)),
        decisions=(("fixed length of #", 3), ("", 1)),
        last_reasons=("fixed length of 2", ""),
    )
    lines = _shown(several)
    assert "5 tokens in 4 rounds, 1.25 tokens a round. 1 of 6 drafted tokens kept (17 %)." in lines
    assert "1 round drafted 0 tokens" in lines
    assert "3 rounds drafted 2 tokens" in lines
    assert "fixed length of 2 (3 rounds; the numbers are the last round's)" in lines
    assert "nothing to decide (1 round)" in lines
    assert not any("#" in line for line in lines)
