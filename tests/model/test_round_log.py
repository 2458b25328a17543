"""With -vv, the log has a line for each round."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from resolved import config_of

from lab.options import engine_options
from lab.synth import write_preset
from offload.engine import open_engine
from specoffload.config.resolution import demo_file
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.logits_log import TRACE
from specoffload.session.session import Session
from specoffload.speculation.surplus_cells import SurplusCells


def test_rounds_are_logged_with_their_drafts(caplog: pytest.LogCaptureFixture) -> None:
    draft, spec = demo_file("draft.gguf"), {"--spec-policy": "p-min", "--draft-max": 4}
    config = config_of(device="cpu", draft=draft, threads=1, use_profile=False, spec_given=spec)
    with caplog.at_level(logging.DEBUG, "specoffload.speculation"), Session(config) as session:
        options = GenerateOptions(n_predict=24, ignore_eos=True)
        stats = [piece.stats for piece in session.generate("import os\n", options)][-1]
    assert stats is not None
    args = [r.args for r in caplog.records if r.getMessage().startswith("round ")]
    assert [a[0] for a in args if isinstance(a, tuple)] == list(range(1, stats.n_rounds + 1))
    drafted, verified = ([a[i] for a in args if isinstance(a, tuple)] for i in (1, 4))
    assert sum(map(int, map(str, verified))) == stats.n_drafted
    assert sum(map(int, map(str, drafted))) > stats.n_drafted, "a token below p-min is not verified"
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("round ")]
    possible = [int(re.findall(r"at most (\d+) possible", line)[0]) for line in lines]
    n_emitted = [1 + int(re.findall(r"(\d+) accepted", line)[0]) for line in lines]
    n_left = 24
    for n_most, n in zip(possible, n_emitted, strict=True):
        assert n_most == min(4, n_left - 1), "--draft-max, or the tokens left to write"
        n_left -= n
    for n, best, line in zip(drafted, verified, lines, strict=True):
        gap = int(str(n)) - int(str(best)) if best else 0
        assert f"best {best}, gap {gap}, surplus KV cells 0: " in line
    places = [r.getMessage() for r in caplog.records if r.getMessage().startswith("  position ")]
    assert len(places) == sum(map(int, map(str, drafted)))
    for place in places:
        shares = [float(share) for share in re.findall(r" ([01]\.\d+)(?:,|$)", place)]
        assert len(shares) == 3
        assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(("n_rows", "n_possible"), [(64, 4), (4, 3)])
def test_the_largest_possible_draft_is_limited_by_context_and_batch(
    caplog: pytest.LogCaptureFixture, n_rows: int, n_possible: int
) -> None:
    config = config_of(
        device="cpu", draft=demo_file("draft.gguf"), threads=1, use_profile=False, ctx_size=256,
        spec_given={"--spec-policy": "fixed", "--draft-max": 8},
    )  # fmt: skip
    with caplog.at_level(logging.DEBUG, "specoffload.speculation"), Session(config) as session:
        session.target.sequences.n_outputs = n_rows
        prompt = [5 + i % 7 for i in range(session.target.sequences.n_ctx - 5)]
        for _ in session.generate(prompt, GenerateOptions(n_predict=99, ignore_eos=True)):
            pass
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("round ")]
    assert f"at most {n_possible} possible" in lines[0]
    assert re.findall(r"round 1: (\d+) drafted", lines[0]) == [str(n_possible)]


@pytest.mark.parametrize("accept", ["match", "reject"])
def test_logits_of_verified_rows_are_logged_below_the_debug_level(
    caplog: pytest.LogCaptureFixture, accept: str
) -> None:
    spec = {"--spec-policy": "fixed", "--draft-max": 2, "--spec-accept": accept}
    draft = demo_file("draft.gguf")
    config = config_of(device="cpu", draft=draft, threads=1, use_profile=False, spec_given=spec)
    options = GenerateOptions(n_predict=6, ignore_eos=True)
    with caplog.at_level(TRACE, "specoffload.speculation"), Session(config) as session:
        stats = [piece.stats for piece in session.generate("import os\n", options)][-1]
        prompt = session.tokenize("import os\n", add_special=True, parse_special=False)
        session.forget()
        logits = session.target.sequences.extend(0, prompt)[-1]
    assert stats is not None
    lines = [r.getMessage() for r in caplog.records if "row " in r.getMessage()]
    assert len(lines) == stats.n_rounds + stats.n_drafted
    found = re.fullmatch(r"  (\d+) tokens, row 0 \(token (\d+)\): (.*) \.\.\. (.*)", lines[0])
    assert found is not None
    assert (int(found[1]), int(found[2])) == (len(prompt), prompt[-1])
    for words, row in ((found[3], logits[:3]), (found[4], logits[-3:])):
        assert [float(word) for word in words.split()] == pytest.approx(row.tolist(), abs=1e-2)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "specoffload.speculation"), Session(config) as session:
        for _ in session.generate("import os\n", options):
            pass
    assert not [r for r in caplog.records if "row " in r.getMessage()]


def test_cells_that_a_rewind_leaves_are_counted(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_preset("qwen3next", models / "cells.gguf", size="tiny", seed=3)
    with open_engine(path, engine_options(device="cpu", n_ctx=256, n_sequences=2)) as engine:
        sequences = engine.sequences
        cells = SurplusCells(sequences, 2)
        sequences.extend(0, [(7 * i + 3) % 64 for i in range(20)], 0)
        checkpoint = sequences.checkpoint(0)

        def surplus() -> int | None:
            sequences.extend(0, [5, 6], 0)
            sequences.restore(0, checkpoint)
            sequences.extend(0, [7, 8], 0)
            return cells.count()

        assert surplus() == 0
        sequences.restore(0, checkpoint)
        monkeypatch.setattr(engine.opened.context, "remove", lambda *_: True)
        assert surplus() == 2
