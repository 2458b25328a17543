"""All that is decided, kept or reported of a start counts the devices that it may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from resolved import config_of

from offload.device import DeviceChoice, devices, start_devices
from offload.errors import DeviceUnavailable
from offload.model_file import read_facts
from offload.probe import probe
from offload.remote.address import RemoteOptions, parse_addresses
from offload.routing.routing import SHARES, CountedHits
from offload.times.hits import Sharing
from offload.times.table import CostTable, DecodeTime, Way
from specoffload.config.options import Toggle
from specoffload.config.resolution import Config, demo_file
from specoffload.kept import CACHE, ON_DEVICE, Kept, KeptFile, KeptRun, place_words, thread_words
from specoffload.opening.choices import StartChoices, devices_of
from specoffload.opening.kept_plan import kept_for_plan, library_build, ubatch_settings
from specoffload.opening.target import projector_of, target_options

TARGET = demo_file("target.gguf")
BOTH, FIRST = ["CUDA0", "CUDA1"], ["CUDA0"]
WORKER = RemoteOptions(parse_addresses("127.0.0.1:1"))
Gpus = Callable[[int], list[DeviceChoice]]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Return a function that gives this machine GPUs, on which the CPU computes."""
    (cpu,) = devices()

    def give(n: int) -> list[DeviceChoice]:
        cards = [
            replace(cpu, name=f"CUDA{i}", description=f"card {i}", wrapped=True, on_gpu=True)
            for i in range(n)
        ]
        monkeypatch.setattr("offload.device.devices", lambda: [cpu, *cards])
        return cards

    return give


@pytest.mark.parametrize(
    ("device", "shares", "has_workers", "wraps", "used"),
    [
        ("auto", (), False, True, BOTH),
        ("auto", (3.0, 1.0), False, True, BOTH),
        ("auto", (3.0, 1.0), True, True, BOTH),
        ("auto", (1.0,), False, True, FIRST),
        ("auto", (), True, True, FIRST),
        ("auto", (), False, False, FIRST),
        ("auto:1", (), False, True, ["CUDA1"]),
        ("CUDA1", (), False, True, ["CUDA1"]),
        ("CUDA1,CUDA0", (), True, True, ["CUDA1", "CUDA0"]),
        ("cpu", (), False, True, ["cpu"]),
    ],
)
def test_auto_means_all_gpus_if_several_may_hold_layers(
    gpus: Gpus, device: str, shares: tuple[float, ...], has_workers: bool, wraps: bool,
    used: list[str],
) -> None:  # fmt: skip
    gpus(2)
    chosen = start_devices(device, shares, has_workers=has_workers, wraps=wraps)
    assert [choice.name for choice in chosen] == used


@pytest.mark.parametrize("n", [0, 1, 2, 3])
@pytest.mark.parametrize("shares", [(), (1.0,), (3.0, 1.0)])
def test_a_start_finds_the_devices_that_its_configuration_names(
    gpus: Gpus, n: int, shares: tuple[float, ...]
) -> None:
    gpus(n)
    config = config_of(model=TARGET, ctx_size=256, tensor_split=shares, use_profile=False)
    options = target_options(config, StartChoices.as_asked(config))
    here = probe(read_facts(TARGET), replace(options, measure_links=None))
    named = [choice.name for choice in devices_of(config)]
    assert [choice.name for choice in here.choices] == named
    assert [device.name for device in here.found.devices] == named
    assert len(named) == (1 if len(shares) == 1 else max(1, n))


def test_a_projector_computes_on_the_cpu_if_several_gpus_may_have_layers(
    gpus: Gpus, tmp_path: Path
) -> None:
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(b"GGUF")

    def reason(device: str) -> str:
        config = config_of(model=TARGET, device=device, mmproj=projector, vram_bytes=1 << 40)
        options = projector_of(config)
        assert options is not None
        return options.on_cpu_reason

    gpus(1)
    assert reason("auto") == ""
    gpus(2)
    assert "several GPUs may share the model" in reason("auto")
    assert reason("CUDA1") == ""


# -- what is kept ----------------------------------------------------------------------------------


def kept_run(config: Config, seconds: float, *choices: DeviceChoice, **more: str) -> KeptRun:
    """A run with one measured decode on these devices."""
    settings = {
        "threads": thread_words(
            config.threads, config.threads_batch, config.decode_on, config.batch_on
        ),
        "device": place_words(choices),
        "build": library_build(),
        CACHE: ON_DEVICE,
    }
    today = datetime.now(UTC).date().isoformat()
    table = CostTable(16, 4, {Way.IN_PLACE: {1: DecodeTime(seconds, 0.0, 3, today)}})
    return KeptRun(settings | more, Sharing(40, 2), table, date=today)


def test_kept_decodes_are_those_of_one_of_the_devices(
    gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    first, second = gpus(2)
    config = config_of(model=TARGET, hybrid=Toggle.ON)

    def change(kept: Kept) -> None:
        kept.hits = CountedHits(
            facts.n_experts, facts.n_experts_used, {0: (0.5,) * len(SHARES)}, 500.0,
            datetime.now(UTC).date(),
        )  # fmt: skip
        kept.runs = [
            kept_run(config, 0.1, first),
            kept_run(config, 0.2, second),
            kept_run(config, 0.3, first, second, layers="0-1/2-4 on auto"),
            kept_run(config, 0.4, first, workers="RPC0 of 127.0.0.1:1"),
        ]

    facts = read_facts(TARGET)
    assert KeptFile(tmp_path, facts).update(change) == ""

    def decodes(**changes: object) -> list[tuple[float, str]]:
        asked = replace(config, **changes)  # type: ignore[arg-type]
        return [(one.seconds, one.device) for one in kept_for_plan(asked).decodes]

    assert decodes() == [(0.1, "CUDA0"), (0.2, "CUDA1")]
    assert decodes(device="CUDA1") == [(0.2, "")]
    assert decodes(device="CUDA0") == decodes(remote=WORKER) == [(0.1, "")]
    assert decodes(device="CUDA1,CUDA0") == [(0.1, "CUDA0"), (0.2, "CUDA1")]
    with pytest.raises(DeviceUnavailable):
        decodes(device="CUDA2")


def test_a_tuned_ubatch_is_for_all_gpus_that_the_start_may_use(gpus: Gpus) -> None:
    config = config_of(model=TARGET)
    devices_named = []
    for n in (1, 2):
        gpus(n)
        devices_named.append(ubatch_settings(config)["device"])
        assert ubatch_settings(config)["device"] == place_words(devices_of(config))
    assert devices_named == ["CUDA0, card 0", "CUDA0, card 0; CUDA1, card 1"]


def test_a_tuned_ubatch_is_for_one_division_of_the_layers(gpus: Gpus) -> None:
    gpus(2)
    usual = config_of(model=TARGET)
    others = (
        replace(usual, tensor_split=(1.0, 1.0)),
        replace(usual, tensor_split=(3.0, 1.0)),
        replace(usual, remote=WORKER),
    )
    each = [ubatch_settings(config) for config in (usual, *others)]
    assert all(each.count(settings) == 1 for settings in each)
