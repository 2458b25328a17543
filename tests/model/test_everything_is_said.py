"""`plan --json` has every reason and every number of a start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from plans import planned_for
from resolved import config_of, spec_of
from wide import examples
from worker import has_rpc, working

from lab.synth import write_preset
from lab.synth.mtp import write_mtp
from lab.synth.published import published_facts
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.plan.decision import decide
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.layout import Layout
from offload.plan.wanted import Wanted
from offload.remote.address import RemoteOptions
from offload.times.context_memory import ContextOptions
from specoffload.commands.plan import as_dict
from specoffload.config.options import PlanOptions, Ram, Toggle
from specoffload.config.resolution import Config
from specoffload.opening.planning import Planned
from specoffload.opening.start import open_target, session_start

GIB = 1 << 30
TITLES = ("DeepSeek-R1", "GLM-4.6", "Qwen3-30B-A3B", "gpt-oss-120b")
# The header, and what is printed in another form: lists of weights and of slots as sums, ranges by
# their first and last layer, and memory that depends on the batch for the plan's ubatch.
NOT_PRINTED = {"facts", "streamed", "host", "layout", "layers", "later_bytes", "names"}
# What is asked for or was measured, not what is decided. Plans take a disk's rate from the request.
REQUESTED = {"request", "disk_bytes_per_s"}


@cache
def header(title: str) -> ModelFacts:
    return published_facts(title, Path(mkdtemp()))


def said(value: Any) -> Iterator[str | float]:
    """All sentences and numbers in a value."""
    if is_dataclass(value):
        for field in fields(value):
            if field.name not in NOT_PRINTED | REQUESTED:
                yield from said(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from said((*value, *value.values()))
    elif isinstance(value, tuple | list | frozenset):
        for its in value:
            yield from said(its)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield str(value) if isinstance(value, Enum) else value


def missing(layout: Layout, printed: Any) -> list[str | float]:
    """What a start with this layout says or takes, and the JSON of its plan lacks."""
    has = set(said(json.loads(json.dumps(printed))))
    shown: list[Any] = []
    for its in layout.devices:
        plan = its.plan
        shown += [plan.slot_bytes, plan.streamed_bytes, plan.n_lent]
        shown += [pool.n_slots for pool in plan.layout.pools]
        shown += [its.facts.layers.start, its.facts.layers.stop - 1]
    if layout.experts is not None:
        shown += said(layout.experts.later_bytes(layout.context.n_ubatch))
    return [value for value in (*said(layout), *shown) if value not in has]


MACHINES = st.fixed_dictionaries(
    {
        "cards_gib": st.lists(st.integers(5, 64), min_size=1, max_size=2),
        "ram_gib": st.sampled_from([1 << 12, 96, 24]),
        "workers": st.lists(st.sampled_from([Kind.STOCK, Kind.WORKER]), max_size=1),
        "vram_gib": st.sampled_from([None, 4, 64]),
        "tuned_ubatch": st.sampled_from([None, 256, 1 << 14]),
        "draft_bytes": st.sampled_from([0, GIB]),
        "mtp": st.booleans(),
        "has_mtp": st.booleans(),
        "kv_offload": st.booleans(),
    }
)


# Shrinking would plan hundreds of published models.
@settings(max_examples=examples(10), deadline=None, phases=(Phase.reuse, Phase.generate))
@given(st.sampled_from(TITLES), MACHINES)
def test_every_reason_and_number_of_a_layout_is_printed(title: str, machine: Any) -> None:
    found = Found(
        tuple(
            FoundDevice(f"GPU{i}", Kind.GPU, gib * GIB)
            for i, gib in enumerate(machine["cards_gib"])
        ),
        workers=tuple(
            FoundDevice("RPC0", kind, 40 * GIB, measured="10 GB/s") for kind in machine["workers"]
        ),
        ram_bytes=machine["ram_gib"] * GIB,
        has_mtp=machine["has_mtp"],
    )
    vram_gib, tuned = machine["vram_gib"], machine["tuned_ubatch"]
    wanted = Wanted(
        ContextOptions(8192, kv_offload=machine["kv_offload"]), hybrid=True,
        n_cpu_moe="fit", plan_for_splits=True, reserve_bytes=machine["draft_bytes"],
        tuned_ubatch=tuned,
        device_bytes=None if vram_gib is None else vram_gib * GIB, mtp=machine["mtp"],
        most_ubatch=max(2048, tuned or 0),
    )  # fmt: skip
    try:
        layout = decide(header(title), found, wanted)
    except DoesNotFit:
        assume(False)
        raise
    printed = as_dict(Planned(layout, ""))
    assert missing(layout, printed) == []


def test_a_lowered_size_and_a_ubatch_that_no_longer_fits_are_printed() -> None:
    card = Found((FoundDevice("GPU0", Kind.GPU, 24 * GIB),), ram_bytes=1 << 42)
    wanted = Wanted(
        ContextOptions(32768), n_cpu_moe="fit", tuned_ubatch=1 << 15,
        device_bytes=64 * GIB, most_ubatch=1 << 15,
    )  # fmt: skip
    layout = decide(header("GLM-4.6"), card, wanted)
    printed = as_dict(Planned(layout, ""))
    for reasons in (printed["reasons"], printed["devices"][0]["reasons"]):
        assert any("23.50 GiB are used" in reason for reason in reasons)
        assert any("does not fit the memory that is free now" in reason for reason in reasons)


def start_is_printed(config: Config, own: PlanOptions) -> None:
    """Assert that a start says and does what `plan` printed before."""
    printed = as_dict(planned_for(config, own))
    strings = {its for its in said(printed) if isinstance(its, str)}
    with open_target(session_start(config)) as engine:
        limits = engine.layout.experts
        measured = () if limits is None else (limits.free_bytes,)  # anew by a plan and by a start
        assert [its for its in missing(engine.layout, printed) if its not in measured] == []
        assert set(() if engine.opened.plan is None else engine.opened.plan.reasons) <= strings
        for note in engine.opened.notes:
            if "in the compute buffer: " in note:
                assert note.split("in the compute buffer: ")[1] in strings


@pytest.mark.usefixtures("steady_links")
@pytest.mark.parametrize("drafts", ["own layers", "a draft model"])
@pytest.mark.parametrize("device", ["cpu", "sim:vram=4MiB", "sim:vram=3MiB,sim:vram=4MiB"])
@pytest.mark.parametrize("ram_part", [None, 0.5])
def test_a_start_says_and_does_what_was_printed(
    device: str, ram_part: float | None, drafts: str, models: Path
) -> None:
    path = write_mtp(models, "glm4moe")
    given: dict[str, Any] = {
        "model": path, "threads": 1, "ctx_size": 256, "device": device, "hybrid": Toggle.ON,
        "spec": spec_of({}),
    }  # fmt: skip
    if drafts == "a draft model":
        given["draft"] = write_preset("glm4moe", models / "said-draft.gguf", size="tiny", seed=4)
        given["spec"] = spec_of({"--spec-type": "draft-simple"})
    own = PlanOptions()
    if ram_part is not None:
        given["ram_bytes"] = int(ram_part * read_facts(path).expert_bytes)
        own = PlanOptions(ram=Ram(given["ram_bytes"]))
    start_is_printed(config_of(**given), own)


@pytest.mark.skipif(not has_rpc(), reason="the library is compiled without ggml's RPC")
def test_a_start_with_a_worker_says_and_does_what_was_printed(models: Path) -> None:
    config = config_of(
        model=write_mtp(models, "glm4moe"), threads=1, ctx_size=256, device="sim:vram=4MiB",
        tensor_split=(1.0, 2.0), spec=spec_of({}),
    )  # fmt: skip
    with working() as worker:
        start_is_printed(replace(config, remote=RemoteOptions((worker.address,))), PlanOptions())
