"""Our record of the KV cache's cells is the library's own, after any series of steps."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
from test_slots import model

from lab.options import engine_options
from offload.engine import open_engine
from offload.sequences.sequences import Sequences

_LINE = re.compile(r"find_slot: stream\[0\], n = +(\d+), used = +(\d+),.*n_swa = +0")
_N_SEQUENCES, _N_CTX = 4, 1024


@pytest.mark.parametrize("kind", ["mistral-large", "deepseek-v3", "gpt-oss", "qwen3next"])
@pytest.mark.parametrize("seed", range(3))
def test_cells_are_those_of_the_library(
    kind: str, seed: int, models: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Random sequences grow, are cut, copied, saved and loaded."""
    monkeypatch.setenv("LLAMA_KV_CACHE_DEBUG", "1")
    caplog.set_level(logging.DEBUG)
    options = engine_options(
        device="cpu", n_ctx=_N_CTX, n_batch=64, n_ubatch=32, n_sequences=_N_SEQUENCES, n_threads=1
    )
    with open_engine(model(kind, models), options) as engine:
        sequences, random = engine.sequences, np.random.default_rng(seed)
        n_compared = 0
        for _ in range(60):
            _change(sequences, random)
            expected = f"{sequences.cells.end} {sequences.cells.n_used}"
            caplog.clear()
            try:
                sequences.extend(int(random.integers(_N_SEQUENCES)), [5], 0)
            except Exception:
                continue
            lines = [_LINE.search(record.getMessage()) for record in caplog.records]
            found = next(f"{line[1]} {line[2]}" for line in lines if line)
            assert found == expected
            n_compared += 1
        assert n_compared > 40


def _change(sequences: Sequences, random: np.random.Generator) -> None:
    """Make one random step that the memory allows."""
    one, other = (int(n) for n in random.permutation(_N_SEQUENCES)[:2])
    n_held = sequences.length(one)
    n_free = _N_CTX - sum(sequences.length(i) for i in range(_N_SEQUENCES))
    match random.integers(5):
        case 0 if n_free > 200:
            sequences.extend(one, [5] * int(random.integers(1, 180)), 0)
        case 1 if sequences.can_drop(one, n := int(random.integers(n_held + 1))):
            sequences.rewind(one, n_held - n)
        case 2:
            sequences.rewind(one, 0)
        case 3 if n_held and n_free > 200:
            saved = sequences.save(one)
            sequences.load(other, saved, [5] * n_held)
        case 4 if n_held:
            sequences.rewind(other, 0)
            sequences.share(one, other, n_held)
