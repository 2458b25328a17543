"""With -vv, the log has a line for each round."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from resolved import config_of

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from specoffload.config.resolution import demo_file
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.session.surplus_cells import SurplusCells


def test_rounds_are_logged_with_their_drafts(caplog: pytest.LogCaptureFixture) -> None:
    draft, spec = demo_file("draft.gguf"), {"--spec-policy": "p-min", "--draft-max": 4}
    config = config_of(device="cpu", draft=draft, threads=1, use_profile=False, spec_given=spec)
    with caplog.at_level(logging.DEBUG, "specoffload.speculation"), Session(config) as session:
        options = GenerateOptions(n_predict=24, ignore_eos=True)
        stats = [piece.stats for piece in session.generate("import os\n", options)][-1]
    assert stats is not None
    args = [r.args for r in caplog.records if r.getMessage().startswith("round ")]
    assert [a[0] for a in args if isinstance(a, tuple)] == list(range(1, stats.n_rounds + 1))
    drafted, verified = ([a[i] for a in args if isinstance(a, tuple)] for i in (1, 3))
    assert sum(map(int, map(str, verified))) == stats.n_drafted
    assert sum(map(int, map(str, drafted))) > stats.n_drafted, "a token below p-min is not verified"
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("round ")]
    for n, best, line in zip(drafted, verified, lines, strict=True):
        gap = int(str(n)) - int(str(best)) if best else 0
        assert f"best {best}, gap {gap}, surplus KV cells 0: " in line
    places = [r.getMessage() for r in caplog.records if r.getMessage().startswith("  position ")]
    assert len(places) == sum(map(int, map(str, drafted)))
    for place in places:
        shares = [float(share) for share in re.findall(r" ([01]\.\d+)(?:,|$)", place)]
        assert len(shares) == 3
        assert shares == sorted(shares, reverse=True)


def test_cells_that_a_rewind_leaves_are_counted(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_preset("qwen3next", models / "cells.gguf", size="tiny", seed=3)
    with Engine(path, EngineOptions(device="cpu", n_ctx=256, n_sequences=2)) as engine:
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
        monkeypatch.setattr(engine._context, "remove", lambda *_: True)
        assert surplus() == 2
