"""The tables of virtual times in docs/gpu.md are the kept rows, and the plan is today's."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from lab import virtual_gpu
from lab.gpu_cases import CHANGING, DECODE, SETUPS, prompt_name
from lab.virtual_gpu import PAGE, REASONS, Virtual

KEPT = virtual_gpu.load()
CELLS = virtual_gpu.kept_cases(KEPT)
_AGAIN = "run scripts/lab/run virtual-gpu --plan"


def test_the_page_has_the_kept_rows() -> None:
    assert virtual_gpu.page(KEPT) == PAGE.read_text("utf-8"), _AGAIN
    assert virtual_gpu.kept_text(KEPT) == virtual_gpu.KEPT.read_text("utf-8")
    assert [*KEPT] == ["cases", "overlap", "turns"]
    for part in KEPT.values():
        assert part["cpu"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", part["date"])
        assert re.fullmatch(r"[0-9a-f]{7,12}", part["commit"]), "the commit that was timed"


def test_every_case_of_every_card_was_kept() -> None:
    assert [(row.setup, row.case, row.card) for row in CELLS] == [
        (setup.name, case, card)
        for setup in SETUPS
        for case in (DECODE, CHANGING, *map(prompt_name, setup.prompts))
        for card in virtual_gpu.CARDS
    ]


def test_the_plan_of_the_table_is_todays() -> None:
    """A change of offload/times/machine.py or of a preset moves cells, and says so here."""
    for row, today in zip(CELLS, virtual_gpu.planned_again(CELLS), strict=True):
        what = f"{row.setup}, {row.case}, {row.card}: {_AGAIN}"
        assert row.plan_s == pytest.approx(today.plan_s, rel=1e-3), what


def test_each_cell_that_differs_has_one_reason() -> None:
    differing = [row for row in CELLS if row.differs]
    text = PAGE.read_text("utf-8")
    assert f"\n{len(differing)} of {len(CELLS)} cells differ by more than 15 %:\n" in text
    for row in differing:
        reasons = [reason.title for reason in REASONS if reason.explains(row)]
        assert len(reasons) == 1, (row, reasons)
    for reason in REASONS:
        assert any(reason.explains(row) for row in differing), f"{reason.title}: no cell differs"


def test_cells_that_moved_change_the_list() -> None:
    first = next(row for row in CELLS if row.differs)
    near = [replace(row, plan_s=row.step_s) if row is first else row for row in CELLS]
    assert virtual_gpu.differences(near) != virtual_gpu.differences(CELLS)
    n = sum(row.differs for row in CELLS)
    assert virtual_gpu.differences(near).startswith(f"{n - 1} of {len(CELLS)} cells")


def test_times_have_signs_and_units() -> None:
    row = Virtual("H100", "resident", prompt_name(512), 0.003, 0.001, ())
    others = [
        replace(row, case=prompt_name(4096), step_s=0.4321, plan_s=0.6),
        replace(row, setup="100 % in slots", step_s=0.0011),
    ]
    text = virtual_gpu.differences([row, *others])
    assert text.startswith("2 of 3 cells differ")
    assert "resident, prompt of 512: H100 +2 ms" in text
    assert "resident, prompt of 4,096: H100 \u2212168 ms" in " ".join(text.split())


def test_kept_rows_are_written_as_they_are_read() -> None:
    assert json.loads(virtual_gpu.kept_text(KEPT)) == KEPT
    assert virtual_gpu.kept_steps_s("H200") == {}
    assert len(virtual_gpu.kept_steps_s("H100")) == len(CELLS) / 3
