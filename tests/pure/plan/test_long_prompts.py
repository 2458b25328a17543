"""A ubatch above 8,192 tokens is chosen only where long prompts gain and the planned work does not
lose."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.synth.published import PublishedFacts
from offload.plan.decision import decide
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.long_prompts import (
    LEAST_GAIN,
    LONG_UBATCHES,
    LONGEST_PROMPT,
    MOST_COST,
    MOST_PROMPT_COST,
    LongPrompt,
    longer_ubatch,
)
from offload.plan.objective import Seconds
from offload.plan.placement import Plan, PlannedModel, PlanRequest, make_plan
from offload.plan.sharing import UBATCHES
from offload.plan.wanted import Wanted
from offload.plan.workload import DECODING
from offload.times.context_memory import ContextOptions, host_input_bytes
from offload.times.decodes import best_s
from offload.times.prompts import prefill_s
from offload.times.work import model_work
from specoffload.config.hardware import PRESETS

GIB = 1 << 30
RTX_4090 = PRESETS["rtx-4090-ddr5"].machine
LONG = LONG_UBATCHES[-1]
PROMPT = LongPrompt(32768, 8192, None)  # type: ignore[arg-type]
times = st.floats(1e-3, 1e3)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> PublishedFacts:
    return PublishedFacts(tmp_path_factory.mktemp("headers"))


def request(n_ctx: int = 32768, gib: int = 24, most: int | None = LONG, **more: Any) -> PlanRequest:
    context = more.pop("context", ContextOptions(n_ctx))
    return PlanRequest(
        budget_bytes=(gib - 1) * GIB, n_cpu_moe="fit", context=context, most_ubatch=most,
        plan_for_splits=True, machine=RTX_4090, **more,
    )  # fmt: skip


# -- the rule


def seconds_of(ways: list[tuple[float, float, float]]) -> Seconds:
    prompt_s, decode_s, even_s = (np.array(column) for column in zip(*ways, strict=True))
    return Seconds(prompt_s, decode_s, even_s, 10.0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(times, times, times, times, st.booleans()), min_size=2, max_size=8),
)
def test_the_chosen_way_gains_on_long_prompts_and_costs_the_planned_work_little(
    ways: list[tuple[float, float, float, float, bool]],
) -> None:
    planned = seconds_of([way[:3] for way in ways])
    long_s, may_use = np.array([way[3] for way in ways]), np.array([way[4] for way in ways])
    may_use[0] = False
    sizes = np.where(may_use, LONG, 8192)
    found = longer_ubatch(PROMPT, long_s, planned, sizes, may_use, 0)
    allowed = [
        i
        for i in np.flatnonzero(may_use)
        if planned.prompt_s[i] <= (1 + MOST_PROMPT_COST) * planned.prompt_s[0]
        and planned.mean_s[i] <= (1 + MOST_COST) * planned.mean_s[0]
        and planned.even_s[i] <= (1 + MOST_COST) * planned.even_s[0]
    ]
    least_s = min((long_s[i] for i in allowed), default=np.inf)
    if found is None:
        assert least_s > (1 - LEAST_GAIN) * long_s[0]
        return
    assert found.index in allowed
    assert long_s[found.index] == least_s <= (1 - LEAST_GAIN) * long_s[0]


@pytest.mark.parametrize(
    ("way", "is_chosen"),
    [
        ((1.0, 1.0, 1.0, 0.9), True),
        ((1.04, 1.0, 1.0, 0.9), True),
        ((1.06, 1.0, 1.0, 0.9), False),  # the planned prompt loses
        ((1.0, 1.05, 1.0, 0.9), False),  # answers lose, if the model prefers some experts
        ((1.0, 1.0, 1.05, 0.9), False),  # answers lose, if it uses all equally often
        ((1.0, 1.0, 1.0, 0.97), False),  # long prompts gain too little
    ],
)
def test_each_limit_decides(way: tuple[float, float, float, float], is_chosen: bool) -> None:
    planned = seconds_of([(1.0, 1.0, 1.0), way[:3]])
    long_s, may_use = np.array([1.0, way[3]]), np.array([False, True])
    found = longer_ubatch(PROMPT, long_s, planned, np.array([8192, LONG]), may_use, 0)
    assert (found is not None) is is_chosen
    if found is not None:
        assert found.reason == (
            "Prompts are computed 16,384 tokens at once, because one of 32,768 tokens is then "
            f"read 1.11 times as fast as with 8,192; one of 8,192 tokens takes {way[0]:.2f} times "
            "as long"
        )


# -- plans


def long_prompt_s(plan: Plan, headers: PublishedFacts, title: str, asked: PlanRequest) -> float:
    prompt = PlannedModel(headers[title], asked).long_prompt(asked)
    assert prompt is not None
    work, n = prompt.work, prompt.n_tokens
    return float(prefill_s(asked.machine, work, plan.sharing, n, plan.n_ubatch, hybrid=True))


@pytest.mark.parametrize(
    ("title", "gib", "least_gain"),
    [("Kimi-K2", 24, 1.4), ("MiniMax-M2", 24, 1.1), ("DeepSeek-V4-Flash", 24, 1.05)],
)
def test_a_plan_with_a_larger_ubatch_reads_long_prompts_faster_within_the_same_memory(
    title: str, gib: int, least_gain: float, headers: PublishedFacts
) -> None:
    facts, asked = headers[title], request(gib=gib)
    plan, usual = make_plan(facts, asked), make_plan(facts, replace(asked, most_ubatch=8192))
    assert (plan.n_ubatch, usual.n_ubatch) == (LONG, 8192)
    assert asked.budget_bytes is not None
    assert max(plan.used_bytes, usual.used_bytes) <= asked.budget_bytes
    gain = long_prompt_s(usual, headers, title, asked) / long_prompt_s(plan, headers, title, asked)
    assert gain >= least_gain
    (said,) = (words for words in plan.reasons if "tokens at once" in words)
    told = re.search(r"read ([\d.]+) times as fast as with 8,192", said)
    assert told is not None
    assert float(told[1]) == pytest.approx(gain, rel=0.05)  # slots are estimated, then counted
    assert not any("tokens at once" in words for words in usual.reasons)
    work = model_work(facts)
    here_s, there_s = (best_s(RTX_4090, work, its.sharing, 1, hybrid=True) for its in (plan, usual))
    assert here_s <= 1.05 * there_s


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("the context holds no such prompt", {"n_ctx": LONG - 256}),
        ("a batch has at most 8,192 tokens", {"most": UBATCHES[-1]}),
        ("the ubatch is the user's", {"most": None, "context": ContextOptions(32768, 4096)}),
        ("the ubatch was measured", {"tuned_ubatch": 4096}),
        ("no prompts are planned", {"mix": DECODING}),
        (
            "the KV cache is in RAM",
            {"context": ContextOptions(32768, kv_offload=False, flash_attn="on")},
        ),
    ],
)
def test_no_larger_ubatch_is_considered(
    why: str, changes: dict[str, Any], headers: PublishedFacts
) -> None:
    facts = headers["Kimi-K2"]
    assert make_plan(facts, request()).n_ubatch == LONG
    asked = request(**changes)
    assert asked.long_ubatches == (), why
    assert make_plan(facts, asked).n_ubatch <= UBATCHES[-1]


def test_a_plan_whose_answers_would_lose_keeps_its_ubatch(headers: PublishedFacts) -> None:
    """The buffers of 16,384 tokens would take dense weights of DeepSeek-R1 from a 24 GiB card."""
    facts, asked = headers["DeepSeek-R1"], request()
    plan = make_plan(facts, asked)
    assert plan == make_plan(facts, replace(asked, most_ubatch=UBATCHES[-1]))
    assert plan.n_ubatch == 8192
    larger = replace(asked, most_ubatch=None, context=ContextOptions(32768, LONG))
    work = model_work(facts)
    decodes_s = [
        best_s(RTX_4090, work, make_plan(facts, its).sharing, 1, hybrid=True)
        for its in (asked, larger)
    ]
    assert decodes_s[1] > 1.2 * decodes_s[0]


def test_a_model_that_fits_the_card_keeps_the_smallest_ubatch(headers: PublishedFacts) -> None:
    plan = make_plan(headers["Qwen3-30B-A3B"], request(gib=80))
    assert not plan.streamed
    assert plan.n_ubatch == UBATCHES[0]


def test_the_long_prompt_is_as_long_as_the_context_up_to_a_limit(headers: PublishedFacts) -> None:
    facts = headers["Qwen3.8-Flash-Next"]
    asked = request(n_ctx=26624, gib=32)
    prompt = PlannedModel(facts, asked).long_prompt(asked)
    assert prompt is not None
    assert (prompt.n_tokens, prompt.n_planned) == (26624, 8192)
    longer = request(n_ctx=131072, gib=32)
    of_context = PlannedModel(facts, longer).long_prompt(longer)
    assert of_context is not None
    assert of_context.n_tokens == LONGEST_PROMPT


def test_inputs_of_a_large_ubatch_never_put_experts_on_the_disk(headers: PublishedFacts) -> None:
    facts = headers["Kimi-K2"]
    device = FoundDevice("GPU0", Kind.GPU, 24 * GIB, machine=RTX_4090)
    asked = Wanted(
        ContextOptions(32768), n_cpu_moe="fit", plan_for_splits=True, hybrid=True,
        most_ubatch=LONG, machine=RTX_4090,
    )  # fmt: skip
    inputs = [
        host_input_bytes(facts, ContextOptions(32768, n_ubatch=n)) for n in (UBATCHES[-1], LONG)
    ]
    assert inputs[1] > inputs[0] + GIB
    sizes = {}
    for ram_gib in range(572, 590):
        layout = decide(facts, Found((device,), ram_bytes=ram_gib * GIB), asked)
        sizes[ram_gib] = layout.context.n_ubatch, layout.experts is None
        if layout.context.n_ubatch == LONG:
            break
    assert layout.context.n_ubatch == LONG, "with enough RAM"
    assert all(n <= UBATCHES[-1] for n, _ in [*sizes.values()][:-1])
    assert (UBATCHES[-1], True) in sizes.values(), "all experts in RAM, and smaller inputs"


@pytest.mark.parametrize(
    ("most_tokens", "n_ubatch"),
    [(None, LONG), (25344, LONG), (LONG, LONG), (12288, UBATCHES[-1]), (4096, 4096)],
)
def test_no_ubatch_is_larger_than_a_devices_kernels_take(
    most_tokens: int | None, n_ubatch: int, headers: PublishedFacts
) -> None:
    """A GTX 10 has 48 KiB of shared memory for a block, and an RTX 30 has 99."""
    device = FoundDevice("GPU0", Kind.GPU, 24 * GIB, machine=RTX_4090, most_tokens=most_tokens)
    asked = Wanted(
        ContextOptions(32768), n_cpu_moe="fit", plan_for_splits=True, hybrid=True,
        most_ubatch=LONG, machine=RTX_4090,
    )  # fmt: skip
    layout = decide(headers["Kimi-K2"], Found((device,)), asked)
    assert layout.context.n_ubatch == layout.plan.n_ubatch == n_ubatch
