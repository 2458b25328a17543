"""A model's layers are divided between devices by their memory and the speed of their links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from test_sharing import ALL, FACTS, LAYER, N_EXPERTS, N_LAYERS, WEIGHTS
from wide import examples

from offload.errors import DoesNotFit
from offload.model import is_experts, layer_of
from offload.plan import devices as plan_devices
from offload.plan import range_times
from offload.plan.devices import DevicePlan, Division, divide, plan_parts
from offload.plan.found import DeviceRoom, FoundDevice, Kind
from offload.plan.objective import MeasuredDecode
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.ranges import LayerRange
from offload.plan.search import may_overlap, prompt_s
from offload.plan.weights import ring_slots
from offload.plan.workload import TokenMix
from offload.schedule.batch import LAYER_RING
from offload.times.context_memory import ContextOptions
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL

REQUEST = PlanRequest(context=ContextOptions(n_ctx=4096), most_ubatch=1024, n_cpu_moe="fit")
WHOLE = LayerRange(0, N_LAYERS + 1)
BUFFERS = 600 << 20  # more than the context takes
WORKING = REQUEST.working_of(FACTS, 1024).device_bytes
SIZES = st.integers(BUFFERS, ALL + BUFFERS)
LINKS = st.sampled_from([3e9, 6e9, 12e9, 25e9, 50e9])


def room(name: str, budget: int, link: float = 25e9) -> DeviceRoom:
    return DeviceRoom(FoundDevice(name, Kind.GPU), budget, replace(TYPICAL, link_bytes_per_s=link))


def rooms(*budgets: int) -> list[DeviceRoom]:
    return [room(f"GPU{i}", budget) for i, budget in enumerate(budgets)]


def divided(devices: list[DeviceRoom], request: PlanRequest = REQUEST) -> Division:
    try:
        return divide(FACTS, devices, request)
    except DoesNotFit:
        assume(False)
        raise


def n_streamed(division: Division) -> dict[str, int]:
    """Return the number of layers whose experts cross each link, by the device's name.

    They cross it in each ubatch of a prompt, which keeps some layers in slots. Devices that take no
    batch are left out, because the CPU computes their streamed experts.
    """

    def crossing(part: DevicePlan) -> int:
        n = min(part.layers.end, N_LAYERS) - part.layers.first - part.plan.n_resident
        n_slots = part.plan.sharing.n_slots
        if n_slots >= n * N_EXPERTS:
            return 0
        return n - max(0, n_slots // N_EXPERTS - LAYER_RING)

    return {
        part.name: crossing(part)
        for part in division.parts
        if part.plan.min_batch is not None and part.plan.min_batch <= part.plan.n_ubatch
    }


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.tuples(SIZES, LINKS), min_size=1, max_size=4))
def test_every_layer_is_on_one_device_in_order_and_within_its_room(
    devices: list[tuple[int, float]],
) -> None:
    found = divided([room(f"GPU{i}", *d) for i, d in enumerate(devices)])
    layers = [i for part in found.parts for i in range(part.layers.first, part.layers.end)]
    assert layers == [*range(N_LAYERS + 1)]
    names = [part.name for part in found.parts]
    assert names == sorted(names), "in the order of the devices"
    for part in found.parts:
        plan = part.plan
        assert part.room.budget_bytes is not None
        used = plan.resident_bytes + plan.slot_bytes + plan.reserve_bytes
        assert used <= part.room.budget_bytes
    assert len({part.plan.n_ubatch for part in found.parts}) == 1


@settings(max_examples=examples(25), deadline=None)
@given(SIZES)
def test_one_device_has_the_plan_that_it_had_before(budget: int) -> None:
    (part,) = divided(rooms(budget)).parts
    assert part.plan == make_plan(FACTS, replace(REQUEST, budget_bytes=budget))
    assert part.layers == WHOLE


def test_a_device_is_planned_by_its_own_measured_decodes() -> None:
    """Those of a whole model on another device, or of all layers on two, say nothing of it."""
    every, here, there = (MeasuredDecode(Sharing(), 1.0, name) for name in ("", "GPU0", "GPU1"))
    request = replace(REQUEST, decodes=(every, there, here))
    (part,) = divided(rooms(ALL + BUFFERS), request).parts
    assert part.request.decodes == (every, here)
    two = rooms(ALL + BUFFERS, ALL + BUFFERS)
    (second,) = plan_parts(FACTS, two, [LayerRange(0, 0), WHOLE], request).parts
    assert second.request.decodes == (every, there)
    ranges = [LayerRange(0, 3), LayerRange(3, N_LAYERS + 1)]
    for part in plan_parts(FACTS, two, ranges, request).parts:
        assert part.request.decodes == ()


@settings(max_examples=6, deadline=None)
@given(SIZES, LINKS, SIZES)
def test_equal_devices_can_be_swapped(budget: int, link: float, other: int) -> None:
    one, two = room("A", budget, link), room("B", budget, link)
    for devices, swapped in (((one, two), (two, one)), ((one, two, room("C", other)),) * 2):
        swapped = swapped if len(swapped) == 2 else (two, one, swapped[2])
        assert divided([*devices]).ranges == divided([*swapped]).ranges


@settings(max_examples=examples(15), deadline=None)
@given(SIZES, SIZES, LINKS, LINKS, LINKS, st.booleans())
@example(LAYER * 4 + BUFFERS, LAYER * 4 + BUFFERS, 25e9, 25e9, 6e9, True)
# The first device keeps seven of ten layers in slots.
@example(4_713_381_888 + WORKING, 629_145_600 + WORKING, 3e9, 6e9, 12e9, False)
def test_a_slower_link_never_gets_more_streamed_layers(
    budget: int, other: int, link: float, fast: float, slow: float, is_first: bool
) -> None:
    """Plans for prompts, which the links bound. In decodes the CPU may compute missing experts."""
    prompts = replace(REQUEST, mix=TokenMix(1, 0))
    its = []
    for rate in sorted((fast, slow)):
        devices = [room("A", budget, rate), room("B", other, link)]
        found = divided(devices if is_first else devices[::-1], prompts)
        its.append(n_streamed(found).get("A", 0))
    assert its[0] <= its[1]


MIXES = st.sampled_from([None, TokenMix(1, 0), TokenMix(0, 1), TokenMix(8, 1)])


@settings(max_examples=examples(4), deadline=None)
@given(st.lists(st.tuples(SIZES, LINKS), min_size=2, max_size=2), MIXES, st.booleans())
@example([(5 * LAYER + BUFFERS, 25e9)] * 2, None, False)
@example([(LAYER + BUFFERS, 12e9)] * 2, TokenMix(8, 1), False)
@example([(689 << 20, 6e9), (753 << 20, 50e9)], None, True)  # dense weights of some layers stream
@example([(3 * LAYER + BUFFERS, 25e9), (BUFFERS, 6e9), (2 * LAYER, 12e9)], None, False)
@example([(BUFFERS, 3e9), (1503238553, 3e9)], TokenMix(1, 0), False)  # a slot for each expert
def test_no_other_ranges_are_expected_to_be_faster_by_a_hundredth(
    devices: list[tuple[int, float]], mix: TokenMix | None, splits: bool
) -> None:
    """Every way to cut the model, with exact plans."""
    its = [room(f"GPU{i}", *device) for i, device in enumerate(devices)]
    request = replace(REQUEST, mix=mix, plan_for_splits=splits)
    times = []
    for cuts in combinations(range(1, N_LAYERS), len(its) - 1):
        ranges = [LayerRange(*pair) for pair in pairwise((0, *cuts, N_LAYERS + 1))]
        try:
            other_way = plan_parts(FACTS, its, ranges, request)
        except DoesNotFit:
            continue
        # A plan does not rely on slots that hold a layer's experts, but not quite a ring.
        slots = [p.plan.sharing.n_slots for p in other_way.parts if p.plan.streamed]
        if not any(N_EXPERTS <= n < ring_slots(WEIGHTS.layout.pools[0]) for n in slots):
            times.append(other_way.expected_s)
    assume(times)
    assert divide(FACTS, its, request, use_all=True).expected_s <= 1.01 * min(times)


@pytest.mark.parametrize("n_devices", [2, 4])
def test_few_plans_are_made_and_few_times_estimated(
    n_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search estimates all ranges of a device at once, and makes plans only for its result."""
    counts = Counter[str]()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return count

    monkeypatch.setattr(plan_devices, "make_plan", counted("plans", make_plan))
    estimate = counted("estimates", range_times.RangeTimes._estimate)
    monkeypatch.setattr(range_times.RangeTimes, "_estimate", estimate)
    budgets = [(2 + i) * LAYER + BUFFERS for i in range(n_devices)]
    for reserve_bytes in (0, LAYER):
        counts.clear()
        request = replace(REQUEST, reserve_bytes=reserve_bytes)
        found = divide(FACTS, rooms(*budgets), request)
        assert counts["plans"] == len(found.parts)
        # For each ubatch and device: alone, as the last one and as another one, with and without a
        # draft.
        n_ubatches = len(request.ubatches)
        assert counts["estimates"] <= n_ubatches * n_devices * 3 * (2 if reserve_bytes else 1)
        counts.clear()
        divide(FACTS, rooms(*[budgets[0]] * n_devices), request)
        # Equal devices are estimated once: alone, as the first, as one between, and as the last.
        assert counts["estimates"] <= n_ubatches * 4 * (2 if reserve_bytes else 1)


def test_the_last_device_computes_a_prompt_beside_the_others() -> None:
    """Prompts of several ubatches take the time of the slower stage, so stages are balanced."""
    devices = rooms(3 * LAYER + BUFFERS, 3 * LAYER + BUFFERS)
    request = PlanRequest(context=ContextOptions(8192, n_ubatch=512), mix=TokenMix(1, 0))
    found = divide(FACTS, devices, replace(request, n_cpu_moe="fit"), use_all=True)
    front_s, last_s = (part.prompt_s for part in found.parts)
    assert max(front_s, last_s) < 1.25 * min(front_s, last_s)
    n_ubatches = 16
    one_each = (front_s + last_s) / n_ubatches
    assert found.expected_s == pytest.approx(
        one_each + (n_ubatches - 1) / n_ubatches * max(front_s, last_s)
    )
    at_once = replace(request, context=ContextOptions(8192, n_ubatch=8192), n_cpu_moe="fit")
    ranges = found.ranges
    alone = plan_parts(FACTS, rooms(*[ALL + (2 << 30)] * 2), ranges, at_once)
    assert alone.expected_s == pytest.approx(sum(part.prompt_s for part in alone.parts))
    # The CPU computes the experts of a last device with a slow link, which then saves no time.
    slow = [devices[0], room("GPU1", 3 * LAYER + BUFFERS, 1e8)]
    by_cpu = plan_parts(FACTS, slow, ranges, request)
    assert not by_cpu.parts[-1].plan.computes_ubatches
    assert by_cpu.expected_s == pytest.approx(sum(part.prompt_s for part in by_cpu.parts))


@pytest.mark.parametrize(
    ("is_remote", "expected"),
    [([False], False), ([True], True), ([False, False], True), ([True, False], False),
     ([False, True], True), ([True, False, False], True)],
)  # fmt: skip
def test_the_last_device_needs_a_thread_or_another_machine(
    is_remote: list[bool], expected: bool
) -> None:
    devices = [
        replace(device, is_remote=it) for device, it in zip(rooms(0, 0, 0), is_remote, strict=False)
    ]
    assert may_overlap(devices) is expected


def test_it_is_said_that_the_faster_division_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 4 * LAYER + BUFFERS
    devices = rooms(budget, budget)
    assert len(divided(devices).parts) == 2
    exact = plan_devices.plan_parts

    def refused(*arguments: Any, **more: Any) -> Division:
        if all(len(layers) for layers in arguments[2]):
            raise DoesNotFit("by a little")
        return exact(*arguments, **more)

    monkeypatch.setattr(plan_devices, "plan_parts", refused)
    (reason,) = divided(devices).reasons
    assert reason.endswith("not used, because the division that would be faster does not fit")


def test_the_slow_link_gets_what_it_can_hold_and_the_fast_one_streams() -> None:
    budget = 4 * LAYER + BUFFERS
    found = divided([room("fast", budget), room("slow", budget, 3e9)])
    assert "slow" not in n_streamed(found)
    assert n_streamed(found)["fast"] > 0
    assert "fast alone" in found.reasons[0]
    assert found.words == "fast layers 0-7, slow layers 8-11"


def test_a_device_is_left_out_if_the_model_gains_nothing_by_it() -> None:
    whole = divided(rooms(ALL + BUFFERS, ALL + BUFFERS))
    assert [part.name for part in whole.parts] == ["GPU0"]
    assert whole.reasons == ("GPU1: not used, because the whole model fits GPU0",)
    tiny = divided(rooms(ALL // 2, 100 << 20))
    assert [part.name for part in tiny.parts] == ["GPU0"]
    assert tiny.reasons[0].startswith("GPU1: not used, because")
    asked = divide(FACTS, rooms(ALL + BUFFERS, ALL + BUFFERS), REQUEST, use_all=True)
    assert [part.name for part in asked.parts] == ["GPU0", "GPU1"]
    decodes = replace(REQUEST, mix=TokenMix(0, 1))  # several devices cost more hand-overs
    unequal = divide(FACTS, rooms(ALL + BUFFERS, ALL + BUFFERS), decodes, use_all=True)
    assert [part.name for part in unequal.parts] == ["GPU0", "GPU1"]


def test_two_devices_hold_what_none_holds_alone() -> None:
    resident = replace(REQUEST, n_cpu_moe=0)
    budget = ALL * 2 // 3 + BUFFERS
    with pytest.raises(DoesNotFit):
        divide(FACTS, rooms(budget), resident)
    found = divide(FACTS, rooms(budget, budget), resident)
    assert len(found.parts) == 2
    assert not any(part.plan.streamed for part in found.parts)


def test_a_model_that_fits_nowhere_is_refused_with_number_limit_and_flag() -> None:
    with pytest.raises(DoesNotFit, match=r"GPU\d, layers .* MiB of GPU memory .*--vram") as e:
        divide(FACTS, rooms(ALL // 8, ALL // 8), replace(REQUEST, n_cpu_moe=0))
    assert str(e.value).count(". ") == 0, "one sentence"
    with pytest.raises(DoesNotFit, match="13 devices cannot share 12 layers"):
        divide(FACTS, rooms(*[ALL] * 13), REQUEST, use_all=True)


def test_a_draft_lies_where_its_room_costs_least() -> None:
    draft = replace(REQUEST, reserve_bytes=LAYER)
    spare = divide(FACTS, rooms(ALL + BUFFERS, LAYER + BUFFERS), draft)
    assert spare.draft_on == "GPU1"
    assert [part.name for part in spare.parts] == ["GPU0"]
    fixed = divide(FACTS, rooms(4 * LAYER + BUFFERS, 3 * LAYER + BUFFERS), draft, draft_on=0)
    free = divide(FACTS, rooms(4 * LAYER + BUFFERS, 3 * LAYER + BUFFERS), draft)
    assert fixed.draft_on == "GPU0"
    assert free.expected_s <= fixed.expected_s * (1 + 1e-9)
    for found in (fixed, free):
        for part in found.parts:
            plan = part.plan
            used = plan.resident_bytes + plan.slot_bytes + plan.reserve_bytes
            assert used <= (part.room.budget_bytes or 0)
            assert (plan.reserve_bytes > LAYER) == (part.name == found.draft_on)
    with pytest.raises(DoesNotFit, match="-devd"):
        plan_parts(
            FACTS, rooms(ALL + BUFFERS, LAYER // 2),
            [WHOLE, LayerRange(0, 0)], draft, draft_on=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    "asked", [{"n_cpu_moe": 5}, {"n_cpu_moe": frozenset({1, 6})}, {"n_gpu_layers": 7}]
)
def test_layers_that_the_user_keeps_in_ram_are_the_same_as_on_one_device(
    asked: dict[str, Any],
) -> None:
    request = replace(REQUEST, **asked)
    ranges = [LayerRange(a, b) for a, b in pairwise((0, 5, N_LAYERS + 1))]
    parts = plan_parts(FACTS, rooms(ALL, ALL), ranges, request).parts
    whole = make_plan(FACTS, replace(request, budget_bytes=2 * ALL))
    names = [entry.name for part in parts for entry in part.plan.streamed]
    if "n_cpu_moe" in asked:
        assert sorted(names) == sorted(entry.name for entry in whole.streamed)
    dense = {name.split(".")[1] for name in names if ".attn_" in name}
    assert len(dense) == whole.sharing.n_dense_streamed == (5 if "n_gpu_layers" in asked else 0)


def test_experts_of_named_layers_are_resident_on_whatever_device_has_the_layer() -> None:
    request = replace(REQUEST, n_cpu_moe=frozenset({1, 6}))
    for sizes in ((ALL, ALL), (ALL // 2, ALL), (ALL, ALL // 3)):
        parts = divide(FACTS, rooms(*sizes), request, use_all=True).parts
        layers = {layer_of(e.name) for part in parts for e in part.plan.streamed if is_experts(e)}
        assert layers == {layer_of(e.name) for e in FACTS.expert_weights} - {1, 6}


def test_streamed_weights_keep_to_host_memory_together() -> None:
    request = replace(REQUEST, host_bytes=ALL // 3)
    parts = divide(FACTS, rooms(ALL // 2, ALL // 2), request).parts
    assert sum(part.plan.streamed_bytes for part in parts) <= ALL // 3


@dataclass(frozen=True)
class Place:
    is_remote: bool = False


def test_of_three_devices_the_plan_prices_only_the_last_as_computing_beside_the_others() -> None:
    """The first two take turns. So a prompt takes their sum, and the last one's last ubatch."""
    three = [Place(), Place(), Place()]
    together = prompt_s([2.0, 3.0, 4.0], three, 4, overlaps=True)
    assert together == pytest.approx(2.0 + 3.0 + 4.0 / 4)
    assert prompt_s([2.0, 3.0, 4.0], three, 4, overlaps=False) == pytest.approx(9.0)
    behind = [Place(is_remote=True), Place(is_remote=True), Place()]
    assert prompt_s([2.0, 3.0, 4.0], behind, 4, overlaps=True) == pytest.approx(9.0)
