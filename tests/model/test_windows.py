"""Models with sliding windows forget tokens outside every window, which changes no logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lab.options import engine_options
from lab.synth import write_preset
from offload.engine import Engine, open_engine
from offload.errors import BadRequest
from offload.measuring import TextWalk
from specoffload.slots.slot import Slot

WINDOW = 64  # tokens, in the tiny model
OPTIONS = {"device": "sim", "n_ctx": 1024, "n_ubatch": 64, "n_batch": 256}


@pytest.fixture(scope="module")
def windowed(models: Path) -> Path:
    return write_preset("gpt-oss-20b", models / "windowed.gguf", n_layer=4, seed=4)


@pytest.fixture
def engine(windowed: Path) -> Iterator[Engine]:
    with open_engine(windowed, engine_options(**OPTIONS)) as opened:  # type: ignore[arg-type]
        yield opened


def tokens(n: int, start: int = 0) -> list[int]:
    return [(17 * i + 5) % 500 for i in range(start, start + n)]


def test_what_is_forgotten_changes_no_logits(engine: Engine, windowed: Path) -> None:
    options = engine_options(**OPTIONS, swa_full=True)  # type: ignore[arg-type]
    with open_engine(windowed, options) as full:
        for target in (engine, full):
            target.sequences.extend(0, tokens(600), n_logits=0)
        expected = full.sequences.extend(0, tokens(9, 600))
        assert np.array_equal(engine.sequences.extend(0, tokens(9, 600)), expected)
        # Rewind a rejected draft, whose end lies within the window.
        for target in (engine, full):
            target.sequences.rewind(0, 602)
        expected = full.sequences.extend(0, tokens(5, 700))
        assert np.array_equal(engine.sequences.extend(0, tokens(5, 700)), expected)
        full.sequences.rewind(0, 100)  # swa_full keeps all cells
        assert full.sequences.length(0) == 100


def test_going_back_behind_the_window_is_refused_and_going_back_to_the_start_is_not(
    engine: Engine,
) -> None:
    engine.sequences.extend(0, tokens(600), n_logits=0)
    assert engine.sequences.can_drop(0, 8)
    assert engine.sequences.can_drop(0, 600)
    assert not engine.sequences.can_drop(0, 500)
    with pytest.raises(BadRequest, match="--swa-full"):
        engine.sequences.rewind(0, 100)
    assert engine.sequences.length(0) == 600, "what was refused changes nothing"
    engine.sequences.rewind(0, 0)
    assert engine.sequences.length(0) == 0


def test_a_prompt_that_shares_only_what_was_forgotten_is_evaluated_anew(engine: Engine) -> None:
    cache = Slot(0, engine.sequences, None, 4)
    first = tokens(600)
    assert cache.reuse(first) == 0
    engine.sequences.extend(0, first, n_logits=0)
    cache.keep(first)
    assert cache.reuse([*first[:100], 7, 8, 9]) == 0
    fresh = engine.sequences.extend(0, [*first[:100], 7, 8, 9], n_logits=1)
    cache.keep(shorter := [*first[:100], 7, 8, 9])
    assert cache.reuse([*shorter, 3, 4]) == 103, "one that goes on is not"
    engine.sequences.rewind(0, 0)
    assert np.array_equal(fresh, engine.sequences.extend(0, [*first[:100], 7, 8, 9], n_logits=1))


@pytest.mark.parametrize("kind", ["q8_0", "f32", "q4_0"])
def test_a_cache_of_another_type_computes_nearly_the_same(kind: str, models: Path) -> None:
    path = write_preset("mistral-7b", models / f"cache-{kind}.gguf", seed=4)
    plain = engine_options(device="sim", n_ctx=256)
    other = engine_options(device="sim", n_ctx=256, type_k=kind, type_v=kind)
    logits = []
    for options in (plain, other):
        with open_engine(path, options) as opened:
            logits.append(opened.sequences.extend(0, tokens(40)))
    likeness = np.corrcoef(logits[0].ravel(), logits[1].ravel())[0, 1]
    assert likeness > (0.98 if kind == "q4_0" else 0.999)


def test_a_latent_cache_has_one_type(tiny_moe: Path) -> None:
    with pytest.raises(BadRequest, match="both must be the same"):
        open_engine(tiny_moe, engine_options(device="sim", type_k="q8_0"))
    with open_engine(
        tiny_moe, engine_options(device="sim", n_ctx=256, type_k="q8_0", type_v="q8_0")
    ) as engine:
        assert np.isfinite(engine.sequences.extend(0, tokens(20))).all()


def test_a_measured_text_goes_back_behind_the_window(engine: Engine) -> None:
    """A measurement decodes more tokens than the memory of the windows holds, and starts again."""
    walk = TextWalk(engine.sequences, 0, tokens(900), 16, 500)
    for _ in range(30):
        walk.time_s(40)
        assert 16 < engine.sequences.length(0) <= 516
