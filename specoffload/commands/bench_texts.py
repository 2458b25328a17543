"""`specoffload bench --texts URL`: does a server write the same texts alone and in company?"""

from __future__ import annotations

from functools import partial
from typing import Any

from specoffload import report
from specoffload.bench.openai_server import OpenAIServer
from specoffload.bench.texts import RUNS, TALKS, first_difference, play_all
from specoffload.config.options import BenchOptions


def bench_texts(own: BenchOptions) -> None:
    """Play all conversations in each run, and compare them with the first. Raises UsageError."""
    assert own.texts is not None
    server = OpenAIServer(own.texts, own.n_predict)
    model = server.model()
    ask = partial(server.ask, model)
    with report.progress("playing conversations") as show:
        played = []
        for number, run in enumerate(RUNS):
            played.append(play_all(TALKS, ask, run))
            show((number + 1) / len(RUNS))
    rows, data, baseline = [], [], played[0]
    for i, talk in enumerate(TALKS):
        n_tokens = sum(map(len, baseline[i]))
        cells, found = [talk.name], dict[str, Any](name=talk.name, n_tokens=n_tokens, runs=[])
        for run, answers in zip(RUNS[1:], played[1:], strict=True):
            difference = first_difference(baseline[i], answers[i])
            cells.append(f"MATCH ({n_tokens} tokens)" if difference is None else difference.words)
            found["runs"].append(
                {"run": run, "match": True}
                if difference is None
                else {"run": run, "match": False, "answer": difference.answer,
                      "token": difference.at, "baseline": difference.baseline,
                      "other": difference.other, "margin": difference.margin}
            )  # fmt: skip
        rows.append(tuple(cells))
        data.append(found)
    report.table(
        f"greedy texts of {model or own.texts}, compared with a first run in sequence",
        ("conversation", "again in sequence", "all at once"),
        rows,
    )
    if any(not run["match"] for one in data for run in one["runs"]):
        report.paragraph(
            "A margin is how much likelier the first run's token was (log-probability). Small ones "
            "are near-ties, which rounding decides: batches of other sizes round in another way"
        )
    report.data({"texts": data})
