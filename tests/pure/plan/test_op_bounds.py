"""A worker's rules are those of the operations that our clients' graphs contain."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lab import ROOT
from offload.worker.op_bounds import BOUNDS, RESULT, ByRule, Integers, Value, Within
from offload.worker.op_rules import _BY_OP, LEAST_SOURCES

RECORD: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "scripts" / "lab" / "worker_operations.json").read_text("utf-8")
)


def test_exactly_the_recorded_operations_have_a_rule_and_bounds() -> None:
    assert BOUNDS.keys() == _BY_OP.keys()
    assert BOUNDS.keys() == RECORD.keys()
    assert LEAST_SOURCES.keys() <= BOUNDS.keys()


@pytest.mark.parametrize("op", sorted(RECORD))
def test_each_recorded_parameter_integer_and_gap_has_a_line(op: str) -> None:
    """A number that a kernel may turn into an address is refused if no line bounds it."""
    recorded, bounds = RECORD[op], BOUNDS[op]
    assert {int(i) for i in recorded["params"]} <= bounds.params.keys()
    assert {int(i) for i in recorded["integers"]} <= bounds.integers.keys()
    assert set(recorded["strided"]) <= bounds.strided
    for index, (least, most) in recorded["params"].items():
        values = [value for value in (least, most) if value]  # 0 stands for other nodes' default
        row = np.zeros((len(values), 16), np.int32)
        for other, bound in bounds.params.items():
            if isinstance(bound, Within):
                row[:, other] = bound.least
        row[:, int(index)] = values
        assert bounds.keeps_params(row).all()


@pytest.mark.parametrize("op", sorted(BOUNDS))
def test_all_that_no_line_names_must_be_zero(op: str) -> None:
    bounds = BOUNDS[op]
    for index in range(16):
        row = np.zeros((3, 16), np.int32)
        row[:, index] = 1, -40, -(2**30)
        bound = bounds.params.get(index)
        if bound is None:
            assert not bounds.keeps_params(row).any()
        elif isinstance(bound, Within):
            assert not bounds.keeps_params(row)[1:].any()
        else:
            assert isinstance(bound, ByRule | Value)
            assert bound.reason
    assert all(isinstance(kind, Integers) for kind in bounds.integers.values())
    assert all(RESULT <= index < 10 for index in bounds.strided)


@pytest.mark.parametrize(
    "op", ["ROLL", "RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN", "SET", "MAP_CUSTOM1"]
)
def test_operations_that_no_client_sends_are_refused(op: str) -> None:
    """ROLL's shift and WKV's sequences led outside the client's buffers."""
    assert op not in BOUNDS
    assert op not in _BY_OP
