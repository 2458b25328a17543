"""The record of what our clients send a worker is that of the present library's graphs."""

from __future__ import annotations

import pytest

from lab.worker_operations import (
    NAMES,
    WAYS,
    as_json,
    from_json,
    kept,
    recorded,
    together,
    tried_apart,
)
from offload.plan.row_draft import MTP_ARCHITECTURES

ALL = as_json(kept())


def test_a_record_can_be_read_and_added_to() -> None:
    assert as_json(from_json(ALL)) == ALL
    assert as_json(together([kept(), kept()])) == ALL


def test_layers_that_draft_are_recorded() -> None:
    assert {name.removeprefix("mtp ") for name in NAMES if name.startswith("mtp ")} == (
        MTP_ARCHITECTURES
    )
    assert "minimax-m3" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_clients_graphs_are_in_the_record(name: str) -> None:
    """A worker would refuse what they contain beyond the record."""
    for way in WAYS:
        assert as_json(together([kept(), tried_apart(name, way)])) == ALL, way


def test_the_record_has_what_clients_send_and_nothing_else() -> None:
    """If this fails, run `scripts/lab/run worker-operations`, and compare the rules with it."""
    assert as_json(recorded()) == ALL
