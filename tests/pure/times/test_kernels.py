"""The machine model's numbers of kernels are those that were counted in graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.graph_nodes import NAMES, kept
from offload.times.decodes import cpu_s
from offload.times.hits import Sharing
from offload.times.kernels import PLAIN_LAYER, kernels_per_layer
from offload.times.machine import TYPICAL
from offload.times.work import ModelWork, WeightWork

WORK = ModelWork(48, WeightWork(20e6, 40e6), WeightWork(500e6, 600e6))


def test_the_table_has_a_counted_model_of_each_architecture() -> None:
    counted = kept()
    assert set(counted) >= set(NAMES)
    by_architecture: dict[str, list[float]] = {}
    for its in counted.values():
        by_architecture.setdefault(its.architecture, []).append(its.per_layer)
    for architecture, found in by_architecture.items():
        used = kernels_per_layer(architecture)
        assert any(used == pytest.approx(one, abs=0.06) for one in found), architecture
        assert used != PLAIN_LAYER


def test_an_unknown_architecture_has_plain_layers() -> None:
    assert kernels_per_layer("nobody's") == PLAIN_LAYER


def test_a_decode_takes_longer_by_each_kernel() -> None:
    plain, many = (
        float(cpu_s(TYPICAL, replace(WORK, kernels_per_layer=n), Sharing(), 1))
        for n in (38.1, 86.8)
    )
    assert many - plain == pytest.approx(48 * (86.8 - 38.1) * TYPICAL.per_kernel_s)


def test_the_library_masks_what_an_indexer_did_not_choose() -> None:
    """The plan counts the whole cache (`_MASKING`). A graph that gathers would need no masks."""
    its = kept()["qwen3.8-flash-next"].kernels
    assert its["FILL"] == 2 * its["TOP_K"]
    assert its["TOP_K"] == its["FLASH_ATTN_EXT"]
    assert its["CONT"] >= 4 * its["TOP_K"], "one copy for each token of a block"
