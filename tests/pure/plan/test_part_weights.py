"""A range of layers has the bytes, the work and the candidates of a model with only its layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sharing import FACTS, LAYER, N_LAYERS, WEIGHTS

from lab.synth.published import published_facts
from offload.model import ModelFacts, layer_of
from offload.plan.candidates import Limits, candidates
from offload.plan.found import DeviceRoom, FoundDevice, Kind
from offload.plan.placement import PlannedModel, PlanRequest, make_plan
from offload.plan.range_times import RangeTimes
from offload.plan.weights import Parts, Weights, device_bytes, spread
from offload.times.context_memory import ContextOptions
from offload.times.machine import TYPICAL
from offload.times.work import LayersWork, model_work

TITLES = (
    "gpt-oss-120b",
    "GLM-5.3-Flash",
    "DeepSeek-R1 UD-Q2_K_XL",
)  # experts in few types, or many


@cache
def facts_of(title: str) -> ModelFacts:
    return published_facts(title, Path(mkdtemp()))


@cache
def model_of(title: str) -> PlannedModel:
    return PlannedModel(facts_of(title), PlanRequest())


def one_range(weights: Weights, first: int, end: int) -> Parts:
    return Parts(weights, np.array([[first]]), np.array([[end]]))


cuts = st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted)


def range_of(facts: ModelFacts, cut: list[int]) -> tuple[int, int]:
    """A range with at least one layer."""
    n = facts.n_layers
    first = min(cut[0] * n // 100, n - 1)
    return first, max(first + 1, cut[1] * n // 100)


@pytest.mark.parametrize("title", TITLES)
@settings(max_examples=8, deadline=None)
@given(cuts, st.floats(0, 1), st.floats(0, 1))
def test_a_range_has_the_bytes_of_its_layers(
    title: str, cut: list[int], expert_share: float, dense_share: float
) -> None:
    facts, weights = facts_of(title), model_of(title).weights
    first, end = range_of(facts, cut)
    its = one_range(weights, first, end)
    layers = [i for i in weights.expert_layers if first <= i < end]
    assert its.n_expert_layers.item() == len(layers)
    n, n_dense = round(expert_share * len(layers)), round(dense_share * (end - first))
    chosen = {layers[i] for i in spread(n, len(layers))}
    dense = {first + i for i in spread(n_dense, end - first)}
    model = model_of(title)
    expert_bytes = sum(e.size_bytes for e in model.experts if layer_of(e.name) in chosen)
    assert its.expert_bytes(np.array([[n]])).item() == expert_bytes
    dense_bytes = sum(e.size_bytes for e in model.dense if layer_of(e.name) in dense)
    assert its.dense_bytes(np.array([[n_dense]])).item() == dense_bytes
    assert its.held_bytes.item() == device_bytes(facts.part(first, end))


@pytest.mark.parametrize("title", TITLES)
@settings(max_examples=8, deadline=None)
@given(cuts)
def test_a_range_has_the_work_of_a_model_with_its_layers(title: str, cut: list[int]) -> None:
    """Also the costs of its types, such as those of MXFP4."""
    facts = facts_of(title)
    first, end = range_of(facts, cut)
    its, alone = (
        LayersWork(facts).of(first, end, has_head=False),
        model_work(facts.part(first, end)),
    )
    if alone.n_expert_layers:
        assert its == alone
    else:
        assert (its.n_expert_layers, its.dense, its.n_layers) == (0, alone.dense, alone.n_layers)


def test_a_whole_model_lists_every_number_of_layers() -> None:
    limits = PlanRequest(n_cpu_moe="fit").limits(WEIGHTS.whole)
    found = candidates(WEIGHTS.whole, limits, device_bytes(FACTS)).sharing
    both = np.ravel(found.n_resident).tolist(), np.ravel(found.n_dense_streamed).tolist()
    resident, dense = ([(n, 0) for n in range(N_LAYERS + 1)], range(1, N_LAYERS + 1))
    assert list(zip(*both, strict=True)) == [*resident, *((0, n) for n in dense)]


@given(st.integers(1, 2 * N_LAYERS * LAYER))
def test_of_thousands_of_ranges_numbers_that_fit_are_listed(room_bytes: int) -> None:
    """The first and the last number that fit, and steps between them."""
    n = 3000
    first, end = np.zeros((n, 1), int), np.full((n, 1), N_LAYERS)
    parts = Parts(WEIGHTS, first, end)
    limits = Limits(*(np.full((n, 1), k) for k in (0, N_LAYERS, 0, N_LAYERS)))
    many = candidates(parts, limits, np.full((n, 1), room_bytes))
    whole = one_range(WEIGHTS, 0, N_LAYERS)
    every = candidates(whole, PlanRequest(n_cpu_moe="fit").limits(whole), room_bytes)
    assert many.fits.shape[1] < every.fits.shape[1]
    assert many.fits[0].any() == every.fits.any()
    for kind in ("n_resident", "n_dense_streamed"):
        its, all_of_it = (np.broadcast_to(getattr(c.sharing, kind), c.fits.shape)[0][c.fits[0]]
                          for c in (many, every))  # fmt: skip
        if every.fits.any():
            assert (its.min(), its.max()) == (all_of_it.min(), all_of_it.max())


@pytest.mark.parametrize("splits", [False, True])
@settings(max_examples=6, deadline=None)
@given(st.integers(LAYER, 8 * LAYER), st.sampled_from([512, 2048]))
def test_one_device_alone_is_estimated_as_its_plan(
    splits: bool, budget_bytes: int, n_ubatch: int
) -> None:
    """The search over ranges and the plan of the whole model have one cost."""
    request = PlanRequest(
        budget_bytes=budget_bytes + (1 << 30), context=ContextOptions(4096, n_ubatch),
        n_cpu_moe="fit", plan_for_splits=splits,
    )  # fmt: skip
    device = DeviceRoom(FoundDevice("GPU0", Kind.GPU), request.budget_bytes, TYPICAL)
    stages = RangeTimes(FACTS, request).stages(
        device, device.budget_bytes, n_ubatch, is_last=True, is_first=True
    )
    plan = make_plan(FACTS, request)
    its = PlannedModel(FACTS, request).seconds(request, plan.sharing, n_ubatch)
    assert stages.prompt_s[0] + stages.decode_s[0] == pytest.approx(float(its.mean_s), rel=0.02)
