"""With -vv, the log has a line for each round."""

from __future__ import annotations

import logging

import pytest
from resolved import config_of

from specoffload.config.resolution import demo_file
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import Session


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
