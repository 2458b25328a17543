"""Weights on the CPU are repacked or keep the file's layout, whichever was measured faster."""

from __future__ import annotations

import re

import pytest

from offload.model import TensorEntry
from offload.plan.placement import name_patterns
from offload.plan.repacking import LayoutTimes, Repacking, WeightKind, choose_layouts
from offload.plan.workload import PlannedWork

EXPERTS, DENSE = WeightKind(True, "q4_K"), WeightKind(False, "q4_K")
CHAT = PlannedWork(4096, 512)
# What 2 cores with AVX-512 VNNI and with AVX2 alone take, in us.
TILED = LayoutTimes(312, 244, 102, 213)
ROW_BY_ROW = LayoutTimes(280, 201, 140, 168)
GEMM = LayoutTimes(254, 181, 112.5, 118.5)
SLOWER_PLAIN = LayoutTimes(389, 253, 345, 230)


def weight(name: str, type_name: str = "q4_K", size_bytes: int = 64 << 20) -> TensorEntry:
    return TensorEntry(name, type_name, (4096, 4096), 0, size_bytes)


WEIGHTS = [
    weight("token_embd.weight"),
    weight("blk.0.attn_q.weight"),
    weight("blk.1.attn_q.weight"),
    weight("blk.0.ffn_up_exps.weight"),
    weight("blk.1.ffn_up_exps.weight"),
    weight("blk.0.ffn_down_exps.weight", "q6_K"),
    weight("blk.0.attn_v.weight", "q4_0", 1 << 20),
]


def choose(times: dict[WeightKind, LayoutTimes], work: PlannedWork = CHAT) -> Repacking:
    """The choice for WEIGHTS, if ggml can repack the kinds in `times` alone."""
    return choose_layouts(WEIGHTS, times.get, work)


@pytest.mark.parametrize(
    ("n_prompt", "n_generated", "plain"),
    [(4096, 512, True), (0, 1, False), (700, 1000, True), (500, 1000, False)],
)
def test_the_planned_prompts_and_answers_decide(
    n_prompt: int, n_generated: int, plain: bool
) -> None:
    assert TILED.prefers_plain(PlannedWork(n_prompt, n_generated)) == plain


def test_nothing_is_repacked_if_every_measured_kind_is_faster_in_the_files_layout() -> None:
    found = choose({EXPERTS: TILED, DENSE: TILED})
    assert (found.is_on, found.plain, found.setting) == (False, (), "not repacked")
    assert found.notes[0] == (
        "--repack auto: dense weights in q4_K keep the file's layout (measured speed ÷ repacked: "
        "prompts 2.09, decodes 0.78)"
    )


def test_everything_is_repacked_that_is_faster_so() -> None:
    found = choose({EXPERTS: SLOWER_PLAIN, DENSE: SLOWER_PLAIN})
    assert (found.is_on, found.plain, found.setting) == (True, (), "")
    assert all(": experts" in note or ": dense" in note for note in found.notes)
    assert all("are repacked" in note for note in found.notes)


def test_experts_can_keep_the_layout_while_dense_weights_are_repacked() -> None:
    found = choose({EXPERTS: ROW_BY_ROW, DENSE: GEMM})
    kept = {e.name for e in WEIGHTS if any(re.search(p, e.name) for p in found.plain)}
    assert found.is_on
    assert kept == {"blk.0.ffn_up_exps.weight", "blk.1.ffn_up_exps.weight"}
    assert found.setting == "not repacked: " + " ".join(found.plain)


def test_kinds_that_ggml_cannot_repack_or_that_are_small_do_not_decide() -> None:
    asked: list[WeightKind] = []
    found = choose_layouts(WEIGHTS, asked.append, CHAT)
    assert found == Repacking(True)
    assert set(asked) == {EXPERTS, DENSE, WeightKind(True, "q6_K")}


def test_a_pattern_matches_exactly_the_names() -> None:
    names = [e.name for e in WEIGHTS[:3]]
    patterns = name_patterns(names)
    assert len(patterns) == 2
    for name in [e.name for e in WEIGHTS] + ["blk.10.attn_q.weight", "a.token_embd.weight"]:
        assert any(re.search(p, name) for p in patterns) == (name in names)
