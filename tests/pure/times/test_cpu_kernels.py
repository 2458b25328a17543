"""The CPU's kernels differ by type, with a source for each number that is not assumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab import ROOT
from lab.synth.published import published_facts
from offload.times.cpu_kernels import _KERNELS, PLAIN, ROW_SHARE, cpu_kernel
from offload.times.machine import TYPICAL
from offload.times.work import WeightWork, model_work

PAGE = ROOT / "docs" / "validation.md"


def test_each_number_that_is_not_plain_has_a_source_and_a_row_on_the_page() -> None:
    table = PAGE.read_text("utf-8").split("## Kernels of the CPU by type")[1].split("\n## ")[0]
    for prefix, its in _KERNELS.items():
        assert its.source not in ("", "assumed")
        numbers = f"{its.read_cost:.2g} | {its.cpu_cost:g} | {its.row_share:.2f}"
        assert any(f"{prefix} |" in line and numbers in line for line in table.splitlines())
    assert PLAIN.source == "assumed"
    assert f"| all others | 1 | 1 | {ROW_SHARE:.2f} | assumed" in table


@pytest.mark.parametrize(("name", "share"), [("q2_K", 0.2), ("Q3_K_M", 0.34), ("q4_0", 0.27)])
def test_four_rows_take_as_long_as_was_measured(name: str, share: float) -> None:
    its = WeightWork(1e9, 1e9, row_share=cpu_kernel(name).row_share)
    machine = replace(TYPICAL, cpu_flops=0.36e12)  # one row hides behind reading, four do not
    one_s, four_s = (float(its.cpu_seconds(machine, n)) for n in (1, 4))
    assert four_s / one_s == pytest.approx(1 + 3 * share)


def test_a_scalar_kernel_reads_a_fifth_of_the_rate() -> None:
    scalar, plain = (
        WeightWork(1e9, 1e9, its.cpu_cost, its.read_cost, its.row_share)
        for its in (cpu_kernel("q2_0"), PLAIN)
    )
    ratio = scalar.cpu_seconds(TYPICAL, 1) / plain.cpu_seconds(TYPICAL, 1)
    assert ratio == pytest.approx(59 / 11)


def test_a_file_has_the_mean_of_its_types(tmp_path: Path) -> None:
    """Down projections of UD-Q2_K_XL are of other types than gate and up."""
    of_q2 = model_work(published_facts("DeepSeek-R1 UD-Q2_K_XL", tmp_path)).expert
    assert 0.2 < float(of_q2.row_share) < 0.34
    of_mxfp4 = model_work(published_facts("gpt-oss-120b", tmp_path)).expert
    assert float(of_mxfp4.read_cost) == pytest.approx(cpu_kernel("MXFP4").read_cost)
