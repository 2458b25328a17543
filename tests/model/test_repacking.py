"""Weights on the CPU give the same texts in the file's layout and repacked."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resolved

from lab.options import engine_options
from offload.engine import open_engine
from offload.ggml.extra_buffers import amx_buffer_type
from offload.ggml.layout_speed import layout_times
from offload.plan import repacking
from offload.plan.repacking import LayoutTimes, WeightKind
from specoffload import kept_machine
from specoffload.cpu_load import Load
from specoffload.kept import KeptFile
from specoffload.session.session import Session

KINDS = EXPERTS, DENSE = WeightKind(True, "q4_0"), WeightKind(False, "q4_0")
PLAIN, REPACKED = LayoutTimes(1, 2, 1, 2), LayoutTimes(2, 1, 2, 1)
TOKENS = [(7 * i) % 250 for i in range(48)]


@pytest.fixture(scope="module", params=["qwen3moe", "deepseek-v3"])
def quantised(request: pytest.FixtureRequest, models: Path) -> Path:
    """A random mixture in q4_0, which ggml repacks on most processors."""
    from lab.synth import write_preset

    name = str(request.param)
    if name == "deepseek-v3" and amx_buffer_type() is not None:
        pytest.skip("llama.cpp cannot store MLA's k_b for AMX")
    return write_preset(name, models / f"{name}-q4_0.gguf", size="tiny", quant="q4_0", seed=3)


@pytest.fixture
def all_kinds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repacking, "_LEAST_BYTES", 1)


def repacked_kinds(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The kinds of weights that libllama says it repacked since the last call."""
    names = re.findall(r"repack: repack tensor (\S+) with", caplog.text)
    caplog.clear()
    return {"experts" if "_exps." in name else "dense" for name in names}


@pytest.mark.usefixtures("all_kinds_count")
def test_all_layouts_compute_the_same(quantised: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "offload.llama")
    common = engine_options(device="cpu", n_ctx=256, n_threads=1, n_outputs=64)
    can_repack = layout_times(DENSE) is not None

    def logits(expected: set[str], **choice: Any) -> np.ndarray:
        """The logits of a prompt and of four single tokens after it."""
        with open_engine(quantised, engine_options(common, **choice)) as engine:
            rows = [engine.sequences.extend(0, TOKENS, n_logits=len(TOKENS))]
            rows += [engine.sequences.extend(0, [token], n_logits=1) for token in TOKENS[:4]]
        assert repacked_kinds(caplog) == (expected if can_repack else set())
        return np.concatenate(rows)

    def auto(of_experts: LayoutTimes, of_dense: LayoutTimes) -> dict[str, Any]:
        return {"measure_layouts": {EXPERTS: of_experts, DENSE: of_dense}.get}

    none, everything = logits(set(), repack=False), logits({"experts", "dense"}, repack=True)
    assert np.array_equal(logits(set(), **auto(PLAIN, PLAIN)), none)
    assert np.array_equal(logits({"experts", "dense"}, **auto(REPACKED, REPACKED)), everything)
    mixed = [
        logits({"dense"}, **auto(PLAIN, REPACKED)),
        logits({"experts"}, **auto(REPACKED, PLAIN)),
    ]
    for other in (everything, *mixed):
        # A near-tie between two experts may go another way, which changes all logits of its token.
        is_close = np.isclose(other, none, rtol=0, atol=0.02 * float(np.abs(none).max()))
        assert is_close.mean() > 0.97


@pytest.mark.usefixtures("all_kinds_count")
def test_layouts_are_measured_by_three_starts_and_kept(
    quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    timed: list[WeightKind] = []

    def times(kind: WeightKind) -> LayoutTimes | None:
        timed.append(kind)
        return PLAIN if kind in KINDS else None

    monkeypatch.setattr(kept_machine, "layout_times", times)
    monkeypatch.setattr(Load, "is_busy", False)
    config = resolved.config_of(
        **{"model": quantised, "device": "cpu", "threads": 1, "ctx_size": 256}
    )
    for _ in range(4):
        with Session(config) as session:
            assert session.target.start.repacking.setting == "not repacked"
            said = [
                note for note in session.target.opened.notes if note.startswith("--repack auto")
            ]
            assert len(said) == 2
    assert sorted(kind for kind in timed if kind in KINDS) == sorted(3 * [*KINDS])
    assert len(KeptFile(tmp_path).load()[0].layouts) == 2


def test_beside_a_gpu_the_flag_says_that_it_has_no_effect(tiny_moe: Path) -> None:
    options = engine_options(device="sim", n_ctx=256, n_threads=1, repack=True)
    with open_engine(tiny_moe, options) as engine:
        (note,) = [note for note in engine.opened.notes if note.startswith("--repack")]
    assert note.startswith("--repack: no effect with sim")
