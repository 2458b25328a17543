"""The log of -vv: each round's draft with its candidates, and a count of duplicate cells."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from resolved import config_of
from test_lossless_recurrent import write_model

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from specoffload.config.resolution import demo_file
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.speculation.round_log import DuplicateCells

PROMPT = [(7 * i + 3) % 64 for i in range(20)]


def test_a_rollback_that_leaves_rejected_cells_is_counted(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_preset("qwen3next", models / "cells.gguf", size="tiny", seed=3)
    with Engine(path, EngineOptions(device="cpu", n_ctx=256, n_sequences=2)) as engine:
        sequences = engine.sequences
        cells = DuplicateCells(sequences, 2)
        sequences.extend(0, PROMPT, 0)
        sequences.extend(1, PROMPT[:7], 0)
        checkpoint = sequences.checkpoint(0)

        def reject_two_and_go_on() -> int | None:
            sequences.extend(0, [5, 6], 0)
            sequences.restore(0, checkpoint)
            sequences.extend(0, [7, 8], 0)
            return cells.count()

        assert reject_two_and_go_on() == 0
        sequences.restore(0, checkpoint)
        monkeypatch.setattr(engine._context, "remove", lambda *_: True)
        assert reject_two_and_go_on() == 2


def test_a_memory_without_cells_is_not_counted(models: Path) -> None:
    path = write_model(models, "mamba2")
    with Engine(path, EngineOptions(device="cpu", n_ctx=256)) as engine:
        assert DuplicateCells(engine.sequences, 1).count() is None


def test_rounds_are_logged_with_size_gap_and_candidates(caplog: pytest.LogCaptureFixture) -> None:
    draft, spec = demo_file("draft.gguf"), {"--spec-policy": "p-min", "--draft-max": 4}
    config = config_of(device="cpu", draft=draft, threads=1, use_profile=False, spec_given=spec)
    with caplog.at_level(logging.DEBUG, "specoffload.speculation"), Session(config) as session:
        options = GenerateOptions(n_predict=24, ignore_eos=True)
        stats = [piece.stats for piece in session.generate("import os\n", options)][-1]
    assert stats is not None
    rounds = [r for r in caplog.records if r.getMessage().startswith("round ")]
    places = [r for r in caplog.records if r.getMessage().startswith("  position ")]
    assert len(rounds) == stats.n_rounds
    args = [r.args for r in rounds if isinstance(r.args, tuple)]
    sizes, best, gaps = ([int(str(a[i])) for a in args] for i in (1, 3, 4))
    assert sum(best) == stats.n_drafted
    assert sum(sizes) == len(places) > stats.n_drafted, "a token below p-min is drafted, not kept"
    assert gaps == [s - b if b else 0 for s, b in zip(sizes, best, strict=True)]
    assert all("duplicate KV cells 0" in r.getMessage() for r in rounds)
    for place in places:
        shares = [float(share) for share in re.findall(r" ([01]\.\d+)(?:,|$)", place.getMessage())]
        assert len(shares) == 3
        assert shares == sorted(shares, reverse=True)
