"""`specoffload bench --texts URL`: does a server write the same texts alone and in company?

With --responses it gets equal requests: does it write the same text each time?
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

from specoffload import report
from specoffload.bench.openai_server import OpenAIServer
from specoffload.bench.repeated import Repeated, ask_repeatedly
from specoffload.bench.texts import TALKS, first_difference, play_all, talks_of
from specoffload.config.options import BenchOptions, RunOrder
from specoffload.report import plural

_SHOWN = {RunOrder.IN_SEQUENCE: "in sequence", RunOrder.AT_ONCE: "all at once"}


def bench_responses(own: BenchOptions) -> None:
    """Send each question `own.n_responses` times to /v1/responses. Raises UsageError."""
    talks, n = talks_of(own.conversations) or TALKS[:1], own.n_responses
    runs = tuple(dict.fromkeys(own.runs))
    assert own.texts is not None
    server = OpenAIServer(own.texts, own.n_predict, "--texts")
    model = server.model()
    done = count(1)
    repeated, names = list[Repeated](), list[str]()
    with report.progress("asking") as show:
        n_all = n * len(runs) * len(talks)
        for talk in talks:
            for run in runs:
                ask = partial(server.respond, model)
                answers = ask_repeatedly(
                    talk.questions[0], ask, n, run, lambda: show(next(done) / n_all)
                )
                repeated.append(answers)
                names.append(talk.name)
    report.table(
        f"greedy answers of {model or own.texts} to {n} equal requests to /v1/responses",
        ("question", "run", "answers", "characters", "differs after", "its end"),
        [row for one, name in zip(repeated, names, strict=True) for row in _rows(name, one)],
    )  # fmt: skip
    for answers, name in zip(repeated, names, strict=True):
        report.line(f"{name}, {_SHOWN[answers.run]}: {answers.words}")
    report.data({"responses": [_as_data(answers) for answers in repeated]})


def _rows(name: str, repeated: Repeated) -> Iterator[tuple[str, ...]]:
    for text in repeated.texts:
        differs = "" if text.differs_at is None else plural(text.differs_at, "character")
        end = repr(text.end)[1:-1]
        yield name, _SHOWN[repeated.run], str(text.n), str(len(text.text)), differs, end


def _as_data(repeated: Repeated) -> dict[str, Any]:
    return {
        "question": repeated.question,
        "run": repeated.run,
        "n": repeated.n,
        "n_equal": repeated.n_equal,
        "texts": [
            {"n": text.n, "n_characters": len(text.text), "differs_at": text.differs_at,
             "end": text.end}
            for text in repeated.texts
        ],
    }  # fmt: skip


def bench_texts(own: BenchOptions) -> None:
    """Play all conversations in each run, and compare them with the first. Raises UsageError."""
    talks, runs = talks_of(own.conversations) or TALKS, own.runs
    assert own.texts is not None
    server = OpenAIServer(own.texts, own.n_predict, "--texts")
    model = server.model()
    ask = partial(server.ask, model)
    with report.progress("playing conversations") as show:
        played = []
        for number, run in enumerate(runs):
            played.append(play_all(talks, ask, run))
            show((number + 1) / len(runs))
    rows, data, baseline = [], [], played[0]
    for i, talk in enumerate(talks):
        n_tokens = sum(map(len, baseline[i]))
        cells, row = [talk.name], dict[str, Any](name=talk.name, n_tokens=n_tokens, runs=[])
        for run, answers in zip(runs[1:], played[1:], strict=True):
            difference = first_difference(baseline[i], answers[i])
            cells.append(f"MATCH ({n_tokens} tokens)" if difference is None else difference.words)
            row["runs"].append(
                {"run": run, "match": True}
                if difference is None
                else {"run": run, "match": False, "answer": difference.answer,
                      "token": difference.at, "baseline": difference.baseline,
                      "other": difference.other, "margin": difference.margin}
            )  # fmt: skip
        rows.append(tuple(cells))
        data.append(row)
    report.table(
        f"greedy texts of {model or own.texts}, compared with a first run {_SHOWN[runs[0]]}",
        ("conversation", *(f"run {nth}, {_SHOWN[run]}" for nth, run in enumerate(runs[1:], 2))),
        rows,
    )
    if any(not run["match"] for one in data for run in one["runs"]):
        report.paragraph(
            "A margin is how much likelier the first run's token was (log-probability). Small ones "
            "are near-ties, which rounding decides: batches of other sizes round in another way"
        )
    report.data({"texts": data})
