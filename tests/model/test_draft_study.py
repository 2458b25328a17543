"""The lab's study of changed drafts: the files that it writes, and how it ranks measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from lab import draft_study
from lab.draft_study import Variant, narrowed, ranks_agree, study, write_variant
from lab.options import engine_options
from offload.engine import open_engine
from specoffload.config.resolution import demo_file

OPTIONS = engine_options(device="cpu", n_ctx=256)
TEXT = [5, 80, 300, 4000, 17, 256]


def logits(path: Path) -> np.ndarray:  # type: ignore[type-arg]
    with open_engine(path, OPTIONS) as engine:
        return engine.sequences.extend(0, TEXT)


def test_an_unchanged_draft_is_the_embedded_one_and_changed_ones_load(tmp_path: Path) -> None:
    embedded = logits(demo_file("draft.gguf"))
    sizes = {}
    for variant in (
        Variant("same"), Variant("q4_0", Type.Q4_0), Variant("layer", n_layers=1),
        Variant("narrow", n_ff=256),
    ):  # fmt: skip
        path = tmp_path / f"{variant.name}.gguf"
        sizes[variant.name] = write_variant(variant, path, demo_file("draft.gguf"))
        rows = logits(path)
        assert np.isfinite(rows).all()
        assert np.array_equal(rows, embedded) == (variant.name == "same")
    assert sizes["same"] > max(size for name, size in sizes.items() if name != "same")


def test_a_narrowed_part_keeps_its_strongest_channels() -> None:
    rng = np.random.default_rng(2)
    strength = np.array([0.1, 3.0, 2.0, 0.2])
    gate, up = (rng.normal(size=(4, 8)) for _ in range(2))
    weights = {
        "blk.0.ffn_gate.weight": gate / np.linalg.norm(gate, axis=1)[:, None] * strength[:, None],
        "blk.0.ffn_up.weight": up / np.linalg.norm(up, axis=1)[:, None],
        "blk.0.ffn_down.weight": np.ones((8, 4)),
        "blk.1.attn_q.weight": np.ones((8, 8)),
    }
    found = narrowed(
        {k: v.astype(np.float32) for k, v in weights.items()}, Variant("", n_layers=1, n_ff=2)
    )
    assert sorted(found) == sorted(name for name in weights if name.startswith("blk.0"))
    assert np.allclose(found["blk.0.ffn_gate.weight"], weights["blk.0.ffn_gate.weight"][1:3])
    assert found["blk.0.ffn_down.weight"].shape == (8, 2)


def test_ranks() -> None:
    assert ranks_agree([1, 2, 3], [10, 20, 40]) == pytest.approx(1.0)
    assert ranks_agree([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert abs(ranks_agree([1, 1, 2, 2], [1, 2, 1, 2])) < 1e-9


def test_a_small_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_study, "N_TEXTS", 2)
    monkeypatch.setattr(draft_study, "N_TOKENS", 12)
    whole, few = study(1, tmp_path, (Variant("whole"), Variant("few tokens", n_kept=64)))
    assert few.agreement <= whole.agreement
    assert few.overlap < whole.overlap
    assert few.kl > whole.kl
    assert few.file_bytes == whole.file_bytes
    assert min(whole.step_ms, *whole.rates.values(), *few.rates.values()) > 0
