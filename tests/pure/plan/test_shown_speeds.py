"""The speeds that a plan's screen names are those of the place that it names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specoffload.commands.plan_lines import context_lines
from specoffload.opening.speeds import speed_words


def planned(prefill_tps: float, n_ctx: int = 4096, **least: float) -> Any:
    expected = {
        "prefill_tps": prefill_tps, "decode_tps": 40.0, "full_context_decode_tps": 20.0,
    }  # fmt: skip
    each = {"least_decode_tps": 40.0, "least_full_context_decode_tps": 20.0} | least
    return SimpleNamespace(expected=expected, context=SimpleNamespace(n_ctx=n_ctx), **each)


def test_the_speed_of_an_answer_is_that_of_the_contexts_beginning_unless_its_end_is_asked() -> None:
    assert speed_words(planned(100.0)) == "40"
    assert speed_words(planned(100.0), full_context=True) == "20"
    both = {"least_decode_tps": 30.0, "least_full_context_decode_tps": 10.0}
    assert speed_words(planned(100.0, **both)) == "30 to 40"
    assert speed_words(planned(100.0, **both), full_context=True) == "10 to 20"


@pytest.mark.parametrize(
    ("other_tps", "costs"), [(100.0, False), (112.0, False), (90.0, False), (113.0, True)]
)
def test_a_context_costs_speed_if_another_reads_prompts_over_an_eighth_faster(
    other_tps: float, costs: bool
) -> None:
    chosen, other = planned(100.0, 65536), planned(other_tps, 32768)
    contexts: Any = SimpleNamespace(
        costs=[SimpleNamespace(n_ctx=its.context.n_ctx, planned=its) for its in (chosen, other)]
    )
    lines = context_lines(chosen, contexts)
    assert any("The chosen 65,536 tokens cost speed" in line for line in lines) is costs
    if costs:
        assert "--ctx-size 32768 has 110" in lines[0]
        assert "answers are as fast" in lines[0]
