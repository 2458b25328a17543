"""Counts of kernels are what the library builds, and do not depend on widths."""

from __future__ import annotations

import pytest

from lab.graph_nodes import counted, kept


@pytest.mark.parametrize("name", ["qwen3-0.6b"])
def test_the_library_still_builds_the_counted_graph(name: str) -> None:
    assert counted(name) == kept()[name]
