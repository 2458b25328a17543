"""A start opens the layout that `specoffload plan` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import planned_for
from resolved import config_of, spec_of
from wide import examples

from lab.synth import write_preset
from lab.synth.mtp import write_mtp
from lab.synth.tables import write_with_table
from offload.errors import DoesNotFit
from offload.model_file import read_facts
from offload.plan.weights import device_bytes
from specoffload.commands.plan import as_dict, plan_config
from specoffload.config.options import PlanOptions, Ram, Toggle
from specoffload.config.resolution import Config
from specoffload.opening.start import open_target, session_start

pytestmark = pytest.mark.usefixtures("steady_links")
KIB = 1 << 10
SHAPES = ("deepseek-v3", "qwen3-235b-a22b", "gpt-oss-120b")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    found = {
        shape: write_preset(shape, folder / f"{shape}.gguf", size="tiny", seed=3, n_layer=6)
        for shape in SHAPES
    }
    table = write_with_table("gemma4", folder / "table.gguf")
    return found | {"mtp": write_mtp(folder, "glm4moe"), "table": table}


def opens_as_planned(config: Config, own: PlanOptions) -> None:
    why_not = ""
    try:
        planned = planned_for(config, own).layout
    except DoesNotFit as e:
        why_not = str(e)
    if why_not:
        with pytest.raises(DoesNotFit) as refused:
            open_target(session_start(config))
        assert str(refused.value) == why_not
        return
    assert planned is not None
    with open_target(session_start(config)) as engine:
        layout = engine.layout
        names = ("devices", "context", "min_batch", "draft_on", "experts", "tables", "loads_mtp")
        for name in names:
            assert getattr(layout, name) == getattr(planned, name), name
        assert layout == planned
        assert engine.layout.context.n_ubatch == layout.context.n_ubatch
        assert [part.plan for part in engine.opened.weights.parts] == [
            its.plan for its in layout.local
        ]
        streamed_bytes = sum(part.plan.streamed_bytes for part in engine.opened.weights.parts)
        report = None if engine.opened.weights.store is None else engine.opened.weights.store.report
        assert (0 if report is None else report.weight_bytes) == streamed_bytes
        memory = (
            None if engine.opened.weights.store is None else engine.opened.weights.store.experts
        )
        assert (memory is not None) == layout.reads_disk
        assert (engine.opened.tables is not None) == bool(layout.on_disk)


@settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    shape=st.sampled_from([*SHAPES, "mtp", "table"]),
    n_devices=st.integers(1, 3),
    part=st.sampled_from([0.02, 0.3, 0.6, 1.5]),  # share of the model's bytes that fits each device
    n_ctx=st.sampled_from([256, 2048]),
    shares=st.booleans(),
    ram_part=st.sampled_from([None, None, 0.4]),  # share of the model's bytes that fits --ram
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


@pytest.mark.parametrize("part", [0.6, 1.2, None])
def test_a_table_on_the_disk_is_planned_and_opened(
    files: dict[str, Path], part: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """`part` of the experts' bytes are given as --ram."""
    facts = read_facts(files["table"])
    given: dict[str, Any] = {"model": files["table"], "threads": 1, "ctx_size": 512}
    given |= {"device": "sim", "spec": spec_of({"--spec-type": "none"})}
    own = PlanOptions()
    if part is not None:
        given["ram_bytes"] = int(part * facts.expert_bytes)
        own = PlanOptions(ram=Ram(given["ram_bytes"]))
    planned = planned_for(config_of(**given), own)
    assert planned.layout is not None
    assert bool(planned.layout.on_disk) == (part is not None)
    assert planned.layout.reads_disk == (part == 0.6)
    opens_as_planned(config_of(**given), own)
    plan_config(config_of(**given), own, details=True)
    printed = " ".join(capsys.readouterr().out.split())
    what = "of embeddings that are looked up stay"
    assert (f"{what} in RAM, and never on the GPU" in printed) == (part is None)
    assert (f"{what} on the disk (with them" in printed) == (part is not None)
    tables = as_dict(planned)["tables"]
    assert tables["on_disk"] == (part is not None)
    assert tables["size_bytes"] == facts.weights["per_layer_token_embd.weight"].entry.size_bytes
    seconds = tables["bytes_per_token"] / planned.machine.disk_bytes_per_s
    assert tables["disk_s_per_token"] == (seconds if part is not None else 0.0)
    in_ram = replace(planned, layout=replace(planned.layout, tables=None))
    slower_s = 1 / planned.expected["decode_tps"] - 1 / in_ram.expected["decode_tps"]
    assert slower_s == pytest.approx(tables["disk_s_per_token"], rel=1e-3, abs=1e-12)
