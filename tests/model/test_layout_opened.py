"""A start opens the layout that `specoffload plan` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mtp_parts import write_mtp
from resolved import config_of, spec_of

from lab.synth import write_preset
from offload.errors import DoesNotFit
from offload.model_file import read_facts
from offload.plan.sharing import device_bytes
from specoffload.config.options import PlanOptions, Ram, Toggle
from specoffload.config.resolution import Config
from specoffload.planning import planned_for
from specoffload.session.opening import kept_for_plan, open_target

KIB = 1 << 10
SHAPES = ("deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    found = {
        shape: write_preset(shape, folder / f"{shape}.gguf", size="tiny", seed=3, n_layer=6)
        for shape in SHAPES
    }
    return found | {"mtp": write_mtp(folder, "glm4moe")}


def opens_as_planned(config: Config, own: PlanOptions) -> None:
    kept, why_not = kept_for_plan(config), ""
    try:
        planned = planned_for(config, own).layout
    except DoesNotFit as e:
        why_not = str(e)
    if why_not:
        with pytest.raises(DoesNotFit) as refused:
            open_target(config, kept=kept)
        assert str(refused.value) == why_not
        return
    assert planned is not None
    with open_target(config, kept=kept) as engine:
        layout = engine.layout
        for name in ("devices", "context", "min_batch", "draft_on", "experts", "loads_mtp"):
            assert getattr(layout, name) == getattr(planned, name), name
        assert layout == planned
        assert engine.options.n_ubatch == layout.context.n_ubatch
        assert [part.plan for part in engine.parts] == [its.plan for its in layout.local]
        streamed_bytes = sum(part.plan.streamed_bytes for part in engine.parts)
        report = None if engine.store is None else engine.store.report
        assert (0 if report is None else report.weight_bytes) == streamed_bytes
        memory = None if engine.store is None else engine.store.experts
        assert (memory is not None) == layout.reads_disk


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.sampled_from([*SHAPES, "mtp"]),
    n_devices=st.integers(1, 3),
    part=st.sampled_from([0.02, 0.3, 0.6, 1.5]),  # of the model's bytes, in each device's memory
    n_ctx=st.sampled_from([256, 2048]),
    shares=st.booleans(),
    ram_part=st.sampled_from([None, None, 0.4]),  # of the model's bytes, for streamed weights
    hybrid=st.booleans(),
    ubatch=st.sampled_from([None, 128]),
)
def test_what_plan_prints_is_what_a_start_opens(
    files: dict[str, Path],
    shape: str,
    n_devices: int,
    part: float,
    n_ctx: int,
    shares: bool,
    ram_part: float | None,
    hybrid: bool,
    ubatch: int | None,
) -> None:
    path = files[shape]
    size_bytes = device_bytes(read_facts(path))
    each = f"sim:vram={max(64, int(part * size_bytes / KIB))}KiB"
    given: dict[str, Any] = {
        "model": path,
        "threads": 1,
        "ctx_size": n_ctx,
        "device": ",".join([each] * n_devices),
        "ubatch_size": ubatch,
        "hybrid": Toggle.ON if hybrid else Toggle.OFF,
        "spec": spec_of({} if shape == "mtp" else {"--spec-type": "none"}),
    }
    if shares and n_devices > 1:
        given["tensor_split"] = tuple(float(i + 1) for i in range(n_devices))
    own = PlanOptions()
    if ram_part is not None:
        given["ram_bytes"] = int(ram_part * size_bytes)
        own = PlanOptions(ram=Ram(int(ram_part * size_bytes)))
    opens_as_planned(config_of(**given), own)
