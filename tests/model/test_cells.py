"""Our record of the KV cache's cells is the library's own, after any series of steps."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_parts import png
from test_images import session_of
from test_slots import model

from lab.options import engine_options
from offload.engine import open_engine
from offload.ggml.context import _LENDER
from offload.images.place_tokens import image_spans
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


@pytest.mark.parametrize("kind", ["qwen2vl", "gemma3"])
def test_cells_of_a_loaded_image_are_those_that_a_cut_frees(kind: str, models: Path) -> None:
    """With M-RoPE an image has fewer positions than tokens."""
    with session_of(kind, models) as session:
        sequences = session.target.sequences
        tokens = session.image_prompt(("Look at ", png(150, 90, 1), " and say"), add_special=True)
        (span,) = image_spans(tokens)
        sequences.extend_batch([(0, tokens[: span.start], 0)])
        sequences.extend_batch([(0, tokens[span.start : span.end], 0)])
        sequences.extend_batch([(0, tokens[span.end :], 0)])
        state = sequences.save(0)
        for part_bytes in (1 << 30, len(state) // 5):
            sequences.part_bytes = part_bytes
            saved, parts = finished(sequences.saving(0))
            sequences.load(0, saved, tokens, parts)
            assert sequences.cells.n_used == len(tokens)
            assert sequences.save(0)[12:] == state[12:]
            for length in (span.end + 1, span.end, span.start):
                if sequences.can_drop(0, sequences.length(0) - length):
                    sequences.rewind(0, length)
                    assert sequences.cells.n_used == length
            sequences.load(0, state, tokens)


def finished(saving: Generator[None, None, tuple[bytes, tuple[bytes, ...]]]) -> Any:
    """Return what `Sequences.saving` returns."""
    while True:
        try:
            next(saving)
        except StopIteration as e:
            return e.value


def _change(sequences: Sequences, random: np.random.Generator) -> None:
    """Make one random step that the memory allows."""
    one, other = (int(n) for n in random.permutation(_N_SEQUENCES)[:2])
    n_held = sequences.length(one)
    n_free = _N_CTX - sum(sequences.length(i) for i in range(_N_SEQUENCES))
    match random.integers(6):
        case 0 if n_free > 200:
            sequences.extend(one, [5] * int(random.integers(1, 180)), 0)
        case 1 if sequences.can_drop(one, n := int(random.integers(n_held + 1))):
            sequences.rewind(one, n_held - n)
        case 2:
            sequences.rewind(one, 0)
        case 3 if n_held and n_free > 200:
            saved = sequences.save(one)
            sequences.load(other, saved, [5] * n_held)
        case 5 if n_held and n_free > 200 and sequences.saves_parts:
            sequences.part_bytes = sequences.state_bytes(one) // 3
            state, parts = finished(sequences.saving(one))
            assert len(parts) >= 3 or n_held < 4
            sequences.load(other, state, [5] * n_held, parts)
        case 4 if n_held:
            sequences.rewind(other, 0)
            sequences.share(one, other, n_held)


# -- Ctrl-C while cells are lent -------------------------------------------------------------------


class Signalled:
    """The library, in which SIGINT comes right after a call of `name` returns, the `at`-th one."""

    def __init__(self, lib: Any, names: tuple[str, ...], at: int) -> None:
        self._lib, self._names, self.n_left = lib, names, at

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._lib, name)
        if name not in self._names:
            return function

        def call(*given: Any) -> Any:
            answer = function(*given)
            self.n_left -= 1
            if not self.n_left:
                signal.raise_signal(signal.SIGINT)
            return answer

        return call


@pytest.mark.parametrize("at", range(1, 10))
def test_ctrl_c_while_a_part_of_a_text_is_saved_or_added_leaves_no_cell_lent(
    at: int, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("llama_memory_seq_cp", "llama_memory_seq_rm", "llama_state_seq_set_data_ext")
    options = engine_options(device="cpu", n_sequences=2, n_ctx=_N_CTX)
    with open_engine(model("mistral-large", models), options) as engine:
        sequences, context = engine.sequences, engine.opened.context
        text = [(7 * i) % 250 for i in range(60)]
        sequences.extend(0, text[:-1], 0)
        wanted = sequences.extend(0, text[-1:], 1)
        part = context.part_of_state(0, 0, 40)
        lib = Signalled(context._lib, names, at)
        monkeypatch.setattr(context, "_lib", lib)

        def save_and_add() -> None:
            assert context.part_of_state(0, 0, 40) == part
            context.add_state(1, part, range(40))

        with pytest.raises(KeyboardInterrupt):
            save_and_add()
        assert lib.n_left <= 0, "there was a Ctrl-C"
        monkeypatch.undo()
        assert context.last_position(_LENDER) == -1
        assert context.part_of_state(0, 0, 40) == part
        context.remove(1, 0)
        sequences.rewind(0, 59)
        assert np.array_equal(sequences.extend(0, text[-1:], 1), wanted)
