"""Plans for published models' shapes, with device memory and context sizes that people have."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import planned_for
from resolved import config_of
from typer.testing import CliRunner

from lab import plans
from lab.synth.published import PUBLISHED, PublishedFacts
from offload.errors import DoesNotFit
from offload.model import ModelFacts, is_experts, layer_of
from offload.plan.ends import LEAST_GAIN
from offload.plan.objective import MOST_LOSS, Objective
from offload.plan.placement import DEFAULT_UBATCH, Plan, PlanRequest, make_plan
from offload.plan.sharing import SMALL_UBATCHES, UBATCHES
from offload.plan.slot_layout import slot_layout
from offload.plan.weights import device_bytes, ring_slots
from offload.plan.workload import DECODING, USUAL, PlannedWork, TokenMix
from offload.routing.routing import SHARES, HitCurve
from offload.times.context_memory import ContextOptions, context_memory
from offload.times.decodes import best_s, cpu_s, streamed_s
from offload.times.first_table import modelled, modelled_crossover
from offload.times.machine import TYPICAL, Machine
from offload.times.min_batch import NEVER
from offload.times.prompts import prefill_s
from offload.times.search import TimingRequest, budget_s, fill
from offload.times.table import CONTRADICTS, TOLERANCE, Way, agreeing
from offload.times.work import model_work
from specoffload.cli import app
from specoffload.config.options import PlanOptions
from specoffload.opening.speeds import speed_words

GIB = 1 << 30
ROOT = Path(__file__).parents[2]
VRAM_GIB = (8, 12, 16, 24, 48, 80)
CONTEXTS = (4096, 32768, 131072)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFacts]:
    return PublishedFacts(tmp_path_factory.mktemp("headers"))


def plan_of(
    facts: ModelFacts,
    gib: float,
    n_ctx: int,
    machine: Machine = TYPICAL,
    most_ubatch: int | None = UBATCHES[-1],
) -> Plan | None:
    try:
        return make_plan(
            facts,
            PlanRequest(
                budget_bytes=int(gib * GIB),
                n_cpu_moe="fit",
                context=ContextOptions(n_ctx),
                most_ubatch=most_ubatch,
                machine=machine,
            ),
        )
    except DoesNotFit:
        return None


def ring_bytes(facts: ModelFacts) -> int:
    """Bytes of slots for a whole layer's experts and some of the next layer's."""
    experts = [e for e in facts.loaded if is_experts(e)]
    layout = slot_layout(experts, facts.n_experts, facts.n_experts_used)
    return sum(ring_slots(pool) * pool.slot_bytes for pool in layout.pools)


def dense_bytes(facts: ModelFacts) -> int:
    return device_bytes(facts) - facts.expert_bytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_plan_fits_and_says_what_its_slots_do_not_hold(
    name: str, shapes: dict[str, ModelFacts]
) -> None:
    facts = shapes[name]
    for gib in VRAM_GIB:
        for n_ctx in CONTEXTS:
            plan = plan_of(facts, gib, n_ctx)
            context = context_memory(facts, ContextOptions(n_ctx, UBATCHES[0])).total_bytes
            ring_fits = dense_bytes(facts) + context + ring_bytes(facts) <= gib * GIB
            if plan is None:
                assert not ring_fits
                continue
            assert plan.resident_bytes + plan.reserve_bytes + plan.slot_bytes <= gib * GIB
            pools = [pool for pool in plan.layout.pools if pool.n_experts]
            if ring_fits:  # prompts run on the device, which is faster for all of these
                assert plan.declined == ()
            if all(pool.holds(plan.n_ubatch) for pool in pools):
                assert plan.declined == ()
                assert plan.pass_experts == 0
            else:  # the plan declines batches or has passes, even if streaming never pays
                assert bool(plan.declined) != bool(plan.pass_experts)
                assert plan.pass_experts == 0 or plan.min_batch is not None


WORKLOAD = PlannedWork(n_prompt=8192)


@settings(max_examples=25, deadline=None)
@given(
    title=st.sampled_from(list(PUBLISHED)),
    gib=st.floats(6.0, 90.0),
    more=st.floats(0.0, 20.0),
    n_ctx=st.integers(8192, 131072),
    longer=st.integers(0, 131072),
)
@example(title="DeepSeek-R1", gib=24e9 / GIB, more=1.65, n_ctx=65536, longer=65536)
@example(title="Qwen3-235B-A22B", gib=12.0, more=1.0, n_ctx=32768, longer=0)
def test_more_memory_or_a_shorter_context_never_loses_time_nor_does_a_ubatch_of_the_user_win(
    title: str,
    gib: float,
    more: float,
    n_ctx: int,
    longer: int,
    shapes: dict[str, ModelFacts],
) -> None:
    """Holds within 2 %, because a model that fits as a whole takes the smallest usual ubatch."""
    facts, work = shapes[title], model_work(shapes[title])

    def seconds(gib: float, n_ctx: int, n_ubatch: int | None = None) -> float:
        context = ContextOptions(n_ctx, n_ubatch or DEFAULT_UBATCH)
        most = UBATCHES[-1] if n_ubatch is None else None
        try:
            mix = TokenMix(WORKLOAD.n_prompt, WORKLOAD.n_generated)
            request = PlanRequest(
                int(gib * GIB), n_cpu_moe="fit", context=context, most_ubatch=most, mix=mix
            )
            plan = make_plan(facts, request)
        except DoesNotFit:
            return math.inf
        if not plan.streamed:
            return 0.0
        found = Objective(WORKLOAD).seconds(TYPICAL, work, plan.sharing, plan.n_ubatch)
        return float(found.mean_s)

    chosen_s = seconds(gib, n_ctx)
    assert seconds(gib + more, n_ctx) <= 1.02 * chosen_s
    assert chosen_s <= 1.02 * seconds(gib, n_ctx + longer)
    assert chosen_s <= 1.1 * min(seconds(gib, n_ctx, n) for n in (*UBATCHES, *SMALL_UBATCHES))


@settings(max_examples=120, deadline=None)
@given(
    title=st.sampled_from(list(PUBLISHED)),
    gib=st.floats(2.0, 90.0),
    more=st.floats(0.0, 8.0),
    n_ctx=st.sampled_from([512, *CONTEXTS]),
    most_ubatch=st.sampled_from([None, UBATCHES[-1]]),
)
def test_more_memory_is_never_refused_and_never_declines_more_batches(
    title: str,
    gib: float,
    more: float,
    n_ctx: int,
    most_ubatch: int | None,
    shapes: dict[str, ModelFacts],
) -> None:
    less, larger = (
        plan_of(shapes[title], g, n_ctx, most_ubatch=most_ubatch) for g in (gib, gib + more)
    )
    if less is None:
        return
    assert larger is not None
    assert less.resident_bytes + less.reserve_bytes + less.slot_bytes <= gib * GIB
    if not less.sharing.n_dense_streamed and less.n_ubatch not in SMALL_UBATCHES:
        assert less.declined or not larger.declined


@pytest.mark.parametrize("hybrid", [False, True])
def test_plans_that_do_not_fit_host_memory_are_taken_only_where_none_does(
    hybrid: bool, shapes: dict[str, ModelFacts]
) -> None:
    """Plans by counted hits once streamed so much that 128 GB of RAM could not hold it."""
    facts = shapes["Qwen3-235B-A22B"]
    hits = HitCurve(tuple((share, share**0.1) for share in SHARES), 700, date(2026, 3, 1))
    context, most = ContextOptions(8192), UBATCHES[-1]

    def plan(hybrid: bool, host_bytes: int | None) -> Plan:
        request = PlanRequest(
            32 * GIB, n_cpu_moe="fit", context=context, most_ubatch=most, plan_for_splits=hybrid,
            hits=hits, host_bytes=host_bytes,
        )  # fmt: skip
        return make_plan(facts, request)

    least = plan(False, None).streamed_bytes
    assert plan(True, None).streamed_bytes > least
    found = plan(hybrid, least)
    assert found.streamed_bytes <= least
    assert hybrid is not True or any("in RAM, which has room for" in why for why in found.reasons)
    assert plan(hybrid, 10 * GIB).streamed_bytes > 10 * GIB  # no plan fits: the store refuses it


def test_layers_that_are_not_loaded_are_not_planned(shapes: dict[str, ModelFacts]) -> None:
    for name in ("GLM-4.6", "GLM-5", "DeepSeek-V3.2"):
        facts = shapes[name]
        extra = facts.number("block_count") - 1
        plan = plan_of(facts, 48, 4096)
        assert plan is not None
        assert max(layer_of(entry.name) for entry in plan.streamed) == extra - 1
        assert plan.resident_bytes + plan.streamed_bytes < facts.size_bytes


def test_embeddings_of_every_layer_cost_no_device_memory(shapes: dict[str, ModelFacts]) -> None:
    facts = shapes["Gemma-3n-E4B"]
    embeddings = facts.weights["per_layer_token_embd.weight"].entry.size_bytes
    plan = plan_of(facts, 8, 4096)
    assert plan is not None
    assert plan.streamed == ()
    assert plan.resident_bytes <= facts.size_bytes - embeddings


# -- the machine model, applied to R1


# Machines for R1 on 24 GiB: T(1) of 150 ms, a smaller T(1) with a slow link, much faster CPUs
STARTS = [
    Machine(ram_bytes_per_s=95e9),
    Machine(ram_bytes_per_s=95e9, link_bytes_per_s=12e9),
    Machine(ram_bytes_per_s=95e9, link_bytes_per_s=50e9, cpu_flops=0.4e12),
    Machine(ram_bytes_per_s=200e9, cpu_flops=1.5e12),
    Machine(link_bytes_per_s=50e9, ram_bytes_per_s=300e9, cpu_flops=3e12),
]


@pytest.mark.parametrize("machine", STARTS)
@pytest.mark.parametrize("gib", [16, 24, 48])
def test_a_first_start_measures_r1_in_time(
    machine: Machine, gib: int, shapes: dict[str, ModelFacts]
) -> None:
    """Times come from a machine model, and first guesses from a typical machine's model.

    The threshold and T(n) are known in 14 s, although one decode of that many tokens takes longer.
    """
    facts = shapes["DeepSeek-R1"]
    plan, work = plan_of(facts, gib, 4096), model_work(facts)
    assert plan is not None
    spent_s = 0.0
    n_layers = work.n_expert_layers - plan.n_resident
    n_held = plan.slot_bytes * n_layers / plan.streamed_bytes

    def true_s(way: Way, n: int) -> float:
        return (cpu_s if way is Way.IN_PLACE else streamed_s)(machine, work, plan.sharing, n)

    ways = (Way.IN_PLACE, Way.STREAMED)
    table = modelled(TYPICAL, work, plan.sharing, plan.n_ubatch)

    def part(way: Way, n: int) -> float:
        """Share of a decode that is timed. Long decodes stop after more layers than slots hold."""
        if table.seconds(way, n) < 0.4:
            return 1.0
        held = n_held * work.n_experts / work.union(n) if way is Way.STREAMED else 0.0
        return min(1.0, (max(2, math.ceil(held) + 1) + 1) / n_layers)

    def time_size(way: Way, n: int) -> list[float]:
        nonlocal spent_s
        spent_s += part(way, n) * true_s(way, n)
        return [true_s(way, n)]

    most_s = budget_s(true_s(Way.IN_PLACE, 1), len(ways))
    request = TimingRequest(ways, n_most=plan.n_ubatch, part=part)
    fill(table, request, time_size, lambda: most_s - spent_s, "")
    assert spent_s <= 14.0 + true_s(Way.STREAMED, 1)
    found = table.without_modelled().min_batch(plan.n_ubatch)
    true = modelled_crossover(machine, work, plan.sharing)
    assert true is not None
    if true > 64:
        assert found.prefill_experts == pytest.approx(true, rel=0.2)
        assert found.experts == NEVER, "a verification batch is the CPU's"
    else:
        assert found.experts == pytest.approx(true, rel=0.2)
    for n in (1, 2, 8, 33, 64):
        best_s = min(true_s(way, n) for way in ways)
        assert table.best(n)[1] == pytest.approx(best_s, rel=0.1), f"T({n})"


def test_the_page_of_plans_is_made_by_its_script(
    shapes: dict[str, ModelFacts], tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
    made = [plans.example(tmp_path)]
    made += [
        plans.table(shapes[title]) for title in ("DeepSeek-R1", "gpt-oss-120b", "Llama-4-Scout")
    ]
    assert all(part in page for part in made), "run scripts/lab/run plans"


def test_a_row_has_the_speed_at_the_end_of_its_context(shapes: dict[str, ModelFacts]) -> None:
    for title in ("DeepSeek-R1", "Qwen3-235B-A22B", "gpt-oss-120b"):
        short = plans.plan_of(shapes[title], 48, None, 4096)
        layout = replace(short.layout, context=ContextOptions(131072))
        long = replace(short, layout=layout)  # the same sharing of memory
        cells = [list(plans.row(its))[6].split(" to ") for its in (short, long)]
        least, most = ([float(its[end]) for its in cells] for end in (0, -1))
        assert least[1] < least[0], title
        assert most[1] < most[0], title
        assert speed_words(long) == speed_words(short), "at the beginning, both are alike"
        n_prompt = 4096
        alone_s = float(
            prefill_s(
                short.machine,
                short.work,
                short.plan.sharing,
                n_prompt,
                short.plan.n_ubatch,
                hybrid=True,
            )
        )
        assert short.expected["prefill_tps"] < 0.999 * n_prompt / alone_s, "prompts attend, too"


def test_a_row_is_what_the_plan_command_says(shapes: dict[str, ModelFacts], tmp_path: Path) -> None:
    """Its card has 24 GiB, of which 1 GiB stays free, and its machine 256 GB and 64 GB of RAM."""
    path = shapes["gpt-oss-120b"].path
    for ram_gib in (256, 64):
        ram = f"{ram_gib - plans.SYSTEM_GIB}GiB"
        words = [str(path), "--vram", "23GiB", "--ram", ram, "--json"]
        result = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
        plan = json.loads(result.stdout)
        planned = plans.plan_of(shapes["gpt-oss-120b"], 24, ram_gib)
        assert plan["ctx_size"] == planned.context.n_ctx
        assert plan["resident_bytes"] == planned.plan.resident_bytes
        for key in ("prefill_tps", "decode_tps", "full_context_decode_tps"):
            assert plan["expected"][key] == pytest.approx(planned.expected[key], rel=0.03)
        assert plan["host"]["fits"] == (planned.disk is None)


def test_guessed_speeds_have_two_digits_so_that_ranges_stay(shapes: dict[str, ModelFacts]) -> None:
    planned = plans.plan_of(shapes["DeepSeek-V4-Flash"], 13, None, 4096)
    assert planned.is_guess
    assert re.fullmatch(r"1\d to 1\d", speed_words(planned))


def test_all_large_dense_weights_of_kimi_k3_may_stream(shapes: dict[str, ModelFacts]) -> None:
    """Its gates of delta attention and its projections into the latent space are 11 GiB of 57."""
    plan = plan_of(shapes["Kimi-K3"], 11, 4096)
    assert plan is not None, "fits a card of 12 GiB"
    assert plan.sharing.n_dense_streamed
    streamed = {entry.name for entry in plan.streamed}
    kept = [e for e in shapes["Kimi-K3"].loaded if e.name not in streamed and layer_of(e.name) >= 0]
    layers = {layer_of(name) for name in streamed if name.endswith(".ssm_g.weight")}
    large = [e.name for e in kept if e.size_bytes > 20 << 20 and layer_of(e.name) in layers]
    assert all("ffn_gate_inp" in name for name in large), "only routers stay, which are f32"


def test_a_plan_prices_few_ways(shapes: dict[str, ModelFacts]) -> None:
    """Planning takes milliseconds. Calls are counted, since times on a busy machine mean little."""
    facts = shapes["GLM-4.6"]
    priced = 0

    class Counting(Machine):
        def __getattribute__(self, name: str) -> object:
            nonlocal priced
            if name == "per_kernel_s":
                priced += 1
            return super().__getattribute__(name)

    assert plan_of(facts, 24, 32768, Counting()) is not None
    assert priced < 10_000


# -- the default plan: prompts, answers, and more memory ----------------------------------------


def default_plan(
    facts: ModelFacts,
    gib: float,
    n_ctx: int,
    *,
    splits: bool,
    mix: TokenMix | None = None,
) -> Plan | None:
    request = PlanRequest(
        int(gib * GIB), n_cpu_moe="fit", context=ContextOptions(n_ctx), mix=mix,
        most_ubatch=UBATCHES[-1], plan_for_splits=splits,
    )  # fmt: skip
    try:
        return make_plan(facts, request)
    except DoesNotFit:
        return None


@settings(max_examples=10, deadline=None)
@given(
    title=st.sampled_from(list(PUBLISHED)),
    gib=st.integers(5, 60),
    more=st.floats(0.0, 12.0),
    n_ctx=st.sampled_from(CONTEXTS),
    splits=st.booleans(),
)
@example(title="DeepSeek-R1", gib=10, more=2.0, n_ctx=4096, splits=False)
@example(title="DeepSeek-V3.2", gib=20, more=1.0, n_ctx=4096, splits=False)
@example(title="DeepSeek-V3.2", gib=10, more=1.0, n_ctx=4096, splits=True)
def test_more_memory_never_makes_the_default_plan_slower_at_its_work(
    title: str, gib: int, more: float, n_ctx: int, splits: bool, shapes: dict[str, ModelFacts]
) -> None:
    """If less is expected of the larger memory's plan, its low end is better instead."""
    facts, work = shapes[title], model_work(shapes[title])
    objective = Objective(USUAL.workload(min(n_ctx, UBATCHES[-1])), splits)

    def seconds(gib: float) -> tuple[float, float]:
        plan = default_plan(facts, gib, n_ctx, splits=splits)
        if plan is None:
            return math.inf, math.inf
        if not plan.streamed:
            return 0.0, 0.0
        found = objective.seconds(TYPICAL, work, plan.sharing, plan.n_ubatch)
        return float(found.mean_s), float(found.even_s)

    (mean_s, even_s), (less_mean_s, less_even_s) = seconds(gib + more), seconds(gib)
    assert mean_s <= 1.01 * less_mean_s or even_s < less_even_s
    assert even_s <= 1.01 * less_even_s / (1 - MOST_LOSS)


@settings(max_examples=10, deadline=None)
@given(
    title=st.sampled_from(list(PUBLISHED)),
    gib=st.floats(5.0, 60.0),
    n_ctx=st.sampled_from(CONTEXTS),
)
@example(title="DeepSeek-R1", gib=12.0, n_ctx=4096)
@example(title="DeepSeek-R1", gib=18.0, n_ctx=4096)
@example(title="DeepSeek-V3.2", gib=21.0, n_ctx=4096)
def test_a_default_plan_keeps_the_speed_of_answers_or_tells_both_ends(
    title: str, gib: float, n_ctx: int, shapes: dict[str, ModelFacts]
) -> None:
    facts, work = shapes[title], model_work(shapes[title])
    found = default_plan(facts, gib, n_ctx, splits=False)
    fastest = default_plan(facts, gib, n_ctx, splits=False, mix=DECODING)
    if found is None or fastest is None or not found.streamed:
        return
    here, there = (1 / float(best_s(TYPICAL, work, p.sharing, 1)) for p in (found, fastest))
    said = [words for words in found.reasons if "--plan-for decode" in words]
    assert bool(said) == (found.decode_end is not None) == (there > LEAST_GAIN * here)
    if found.decode_end is not None:
        assert found.decode_end.decode_tps == pytest.approx(there)
    assert fastest.decode_end is None


def test_without_a_mix_a_plan_is_made_for_four_prompt_tokens_to_each_answers(
    shapes: dict[str, ModelFacts],
) -> None:
    facts = shapes["DeepSeek-V3.2"]
    default, four = (
        default_plan(facts, 11, 4096, splits=True, mix=mix) for mix in (None, TokenMix(4, 1))
    )
    assert default is not None
    assert four is not None
    assert default.sharing == four.sharing
    assert default.n_ubatch == four.n_ubatch


@pytest.mark.parametrize("hardware", ["rtx-3060-ddr4", "rtx-4090-ddr5", "rtx-5090-threadripper"])
@pytest.mark.parametrize("title", PUBLISHED)
def test_no_batch_takes_longer_than_a_larger_one_or_than_its_parts(
    shapes: dict[str, ModelFacts], title: str, hardware: str
) -> None:
    """For all sizes that drafts can have, in the fastest way and in each way alone."""
    config = config_of(model=shapes[title].path, ctx_size=4096)
    try:
        table = planned_for(config, PlanOptions(hardware=hardware)).costs
    except DoesNotFit:
        pytest.skip(f"{title} does not fit {hardware}")
    curves = {"the fastest way": dict(enumerate(table.curve(64), 1))}
    curves |= {
        way: {n: e.seconds for n, e in of.items() if n <= 64} for way, of in table.ways.items()
    }
    for way, times in curves.items():
        sizes = sorted(times)
        for n, following in pairwise(sizes):
            assert times[n] <= times[following] * (1 + TOLERANCE), f"{way}: {n} and {following}"
    most = agreeing(curves["the fastest way"])
    for n, seconds in curves["the fastest way"].items():
        assert seconds <= CONTRADICTS * most[n], f"{n} tokens are faster as several batches"
