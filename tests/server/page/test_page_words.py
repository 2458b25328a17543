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
from specoffload.server.api.refusals import Api, error_body, refusal_of
from specoffload.server.engine.messages import Event, Problem

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


def _rendered(module: str, show: str, asked: Any) -> list[str]:
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


def _computed(module: str, program: str, asked: object = None) -> Any:
    """The value of `found`, which `program` sets with `parts`, the module, and `asked`."""
    return json.loads(
        _rendered(module, f"let found; {program} root.append(JSON.stringify(found));", asked)[0]
    )


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
    other = _rendered("welcome.js", SHOW_WELCOME, {"is_demo": False, "name": "Qwen3 is ready."})
    assert other[:2] == [
        "What would you like to know?",
        "Qwen3 is ready. What you write goes only to this server.",
    ]
    assert "Load it now" not in other
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


def _status(value: str, **more: object) -> dict[str, Any]:
    return {"id": "m", "status": {"value": value, **more}}


STATES: list[tuple[dict[str, Any], str, str]] = [
    ({"id": "m"}, "m", "m is ready."),
    (_status("loaded"), "m", "m is ready."),
    (
        _status("unloaded"),
        "m (unloaded)",
        "m is not loaded. Your first message loads it, and waits for it.",
    ),
    (_status("loading"), "m (loading)", "m is being loaded. A message waits until it is ready."),
    (
        _status("sleeping"),
        "m (sleeping)",
        "m sleeps, because nobody used it. Your first message wakes it.",
    ),
    (
        _status("unloaded", failed=True),  # as it is told to somebody without the key
        "m (failed)",
        "m could not be loaded. A message tries again.",
    ),
    (
        _status("unloaded", failed=True, message="m.gguf: is not a GGUF file"),
        "m (failed)",
        "m could not be loaded: m.gguf: is not a GGUF file. A message tries again.",
    ),
]


@pytest.mark.parametrize(("model", "option", "words"), STATES)
def test_each_state_of_a_model_has_its_words(
    model: dict[str, Any], option: str, words: str
) -> None:
    program = "found = [parts.optionWords(asked), parts.stateWords(asked)];"
    assert _computed("models.js", program, model) == [option, words]


def test_a_server_that_loads_nothing_by_itself_says_so() -> None:
    program = "found = asked.map((one) => parts.stateWords(one, { loads: false }));"
    unloaded, failed = _computed(
        "models.js", program, [_status("unloaded"), _status("unloaded", failed=True)]
    )
    assert unloaded == "m is not loaded. This server loads a model only when it is told to."
    assert failed.endswith("loaded. This server loads a model only when it is told to.")


def test_after_a_failure_the_choice_is_a_model_that_works() -> None:
    failed = {"value": "unloaded", "failed": True}
    models = [
        {"id": "bad", "status": failed},
        {"id": "worse", "status": failed},
        {"id": "closed", "status": {"value": "unloaded"}},
        {"id": "open", "status": {"value": "loaded"}},
    ]
    program = """found = asked.map(([models, last]) =>
      parts.afterFailure(models, "bad", last)?.id ?? null);"""
    cases = [
        (models, "closed"),  # the one before, which the failed one may have closed
        (models, None),
        (models, "worse"),
        (models, "gone"),
        (models[:3], None),
        (models[:2], "bad"),
    ]
    found = _computed("models.js", program, cases)
    assert found == ["closed", "open", "open", "open", None, None]


def test_signs_of_life_do_not_count_as_tokens_or_as_time() -> None:
    timings = {"predicted_n": 1, "predicted_ms": 100.0}
    sign = {"choices": [{"delta": {}, "finish_reason": None}]}
    text = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
    program = """
    const measured = (chunks) => {
      const meter = new parts.Meter();
      chunks.forEach(([at_s, chunk]) => meter.chunk(chunk, at_s));
      return [meter.n_tokens, meter.samples];
    };
    found = asked.map(measured);"""
    more = {"predicted_n": 9, "predicted_ms": 900.0}
    timed = [(30.0, {**text, "timings": timings}), (30.8, {**text, "timings": more})]
    plain = [(30.0, text), (31.0, text)]
    signs = [(at_s, sign) for at_s in (0.0, 5.0, 10.0, 30.5)]
    cases = [signs[:3], sorted([*signs, *timed], key=lambda c: c[0])]
    cases += [timed, sorted([*signs, *plain], key=lambda c: c[0]), plain]
    none, *others = _computed("meter.js", program, cases)
    assert none == [0, []]
    assert others[0] == others[1] == [9, [[0.1, 1, 0, 0, 0], [0.9, 9, 0, 0, 0]]]
    assert others[2] == others[3] == [2, [[0, 1, 0, 0, 0], [1, 2, 0, 0, 0]]]


def test_the_line_below_an_answer_says_what_cached_routing_changed() -> None:
    program = """
    found = asked.map((timings) => {
      const view = new parts.MeterView();
      view.show(new parts.Meter({ timings, samples: [[1, 9, 0, 0, 0]] }));
      return view.summary.textContent;
    });"""
    stats = replace(ONE, n_tokens=9)
    routed = replace(
        stats, n_choices=1000, n_choices_kept=957, n_choices_cached=980, n_own_cached=931
    )
    cases = [timings_of(its) for its in (stats, routed)]
    plain, shown = _computed("meter.js", program, cases)
    assert "routing" not in plain
    assert shown == (
        f"{plain} · routing kept 95.7 % of the router's choices: 98.0 % were in slots, "
        "93.1 % without"
    )


_ASK = """
globalThis.fetch = async () => new Response(asked.body, { status: asked.status });
found = [];
try {
  for await (const chunk of parts.streamChat({}, "id")) found.push(chunk);
} catch (error) {
  found = [error.status, error.message];
}"""


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("event", list(Event))
def test_every_refusal_is_shown_in_the_words_of_the_chat_api(event: Event, is_stream: bool) -> None:
    """Before a stream and amid it. Codes may be words; the page goes by the status."""
    problem = Problem(
        "Refused", "why it is refused", 503, "unavailable_error",
        event=event, n_prompt_tokens=600, n_ctx=512,
    )  # fmt: skip
    body = json.dumps(error_body(problem, Api.OPENAI))
    sent = {"status": 200 if is_stream else 503, "body": f"data: {body}\n\n" if is_stream else body}
    status, message = _computed("server.js", _ASK, sent)
    assert message == refusal_of(problem, Api.OPENAI).message
    assert isinstance(status, int)
    assert status >= 400
